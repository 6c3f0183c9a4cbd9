"""Pages of the site that are made, and not written: the reference, a page a name; the examples; CONTRIBUTING.md."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Examples but the modules that Python itself needs.
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))
# The public names as docs/reference.md groups them: `- [name](reference.md#name)`, or several names of one page.
ENTRY = re.compile(r"^- `([\w.]+)`", re.MULTILINE)
GROUP = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)

MEMBERS: dict[str, list[str]] = {  # what users call; the others are for the library itself
    "CompiledModule": ["program", "registrations", "report", "layer_collection", "functional", "losses", "detach"],
    "KFAC": [
        "step", "zero_grad", "add_param_group", "damping", "rho", "skipped", "counter", "predicted_change",
        "qmodel_learning_rate", "qmodel_momentum", "kappa", "phases", "state_dict", "load_state_dict",
    ],
    "FisherEstimator": [
        "update_covariances", "update_inverses", "fold", "accumulate", "spectrum", "blocks", "multiply",
        "multiply_inverse", "multiply_matpower", "multiply_cholesky", "state_dict", "load_state_dict",
    ],
    "Spectrum": [
        "at", "corrected", "keys", "eigenvalues", "log_determinant", "trace", "multiply", "multiply_inverse",
        "multiply_matpower", "diagonal", "sample",
    ],
    "ModelSpectrum": [
        "correct", "part", "solve", "precondition", "queries", "self_scores", "functional_variance",
    ],
    "Queries": ["scores", "scores_of_all"],
    "CapturedModel": ["graph", "node", "inputs_of", "outputs_of"],
    "LayerCollection": [
        "node", "inputs_of", "outputs_of", "auto_register_layers", "register_generic", "register_fully_connected",
        "register_fully_connected_multi", "register_embedding", "register_embedding_multi",
        "register_scale_and_shift", "register_conv1d", "register_conv2d", "register_conv2d_multi",
        "register_convolution", "register_depthwise_conv2d", "register_separable_conv2d",
        "register_categorical_predictive_distribution", "register_softmax_cross_entropy_loss",
        "register_normal_predictive_distribution", "register_squared_error_loss",
        "register_multi_bernoulli_predictive_distribution", "register_sigmoid_cross_entropy_loss",
        "register_loss_function", "define_linked_parameters", "linked_parameters", "default_approximation",
        "set_default_approximation", "set_default_sub_sampling", "define_padding_mask", "registered_variables",
        "check_registration", "registrations", "get_blocks", "get_factors", "losses", "towers_by_loss",
        "eval_losses", "eval_losses_on_samples", "total_loss", "total_sampled_loss", "as_default",
    ],
}  # fmt: skip


def on_config(config: Any) -> Any:
    """The version behind the name, the link to the code, and the pages of the reference in the navigation."""
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None, "pyproject.toml has no version"
    config.site_name = f"kfac_fx {version[1]}"
    config.repo_url = config.repo_url or repository()
    (reference,) = (entry["Reference"] for entry in config.nav if isinstance(entry, dict) and "Reference" in entry)
    del reference[1:]
    reference += [
        {group: [{name: page_of(name)} for name in names]} if group != "Errors" else {group: "reference/errors.md"}
        for group, names in groups().items()
    ]
    return config


def repository() -> str | None:
    """The address of the code: that of the build on GitHub, or of the clone's origin."""
    if (server := os.getenv("GITHUB_SERVER_URL")) and (name := os.getenv("GITHUB_REPOSITORY")):
        return f"{server}/{name}"
    found = subprocess.run(["git", "-C", str(ROOT), "remote", "get-url", "origin"], capture_output=True, text=True)
    address = found.stdout.strip().removesuffix(".git")
    return address if address.startswith("https://") else None


def groups() -> dict[str, list[str]]:
    """The public names by the headings of docs/reference.md."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return {title: ENTRY.findall(body) for title, body in GROUP.findall(text)}


def page_of(name: str) -> str:
    return f"reference/{name}.md"


def page(name: str) -> str:
    """The page of a public name: its docstring, its arguments with types and defaults, and its members."""
    lines = [f"::: kfac_fx.{name}", "    options:", "      heading_level: 1"]
    if name in MEMBERS:
        lines += ["      inherited_members: true", "      members:", *(f"        - {m}" for m in MEMBERS[name])]
    return "\n".join(lines) + "\n"


def on_files(files: Any, config: Any) -> Any:
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"examples/{path.stem}.md", content=f"# {path.stem}\n\n```py\n{text}```\n"))
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](examples/", "](../examples/")
    # Files of the repository that are no pages are named and not linked.
    text = re.sub(r"\[([\w.]+)\]\(\1\)", r"`\1`", text)
    files.append(File.generated(config, "contributing.md", content=text))
    for group, names in groups().items():
        if group == "Errors":
            options = "    options:\n      show_root_heading: false\n"
            sections = [f"\n## {name}\n\n::: kfac_fx.{name}\n{options}" for name in names]
            files.append(File.generated(config, "reference/errors.md", content="# Errors\n" + "".join(sections)))
            continue
        for name in names:
            files.append(File.generated(config, page_of(name), content=page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """In the repository, pages link to the examples beside docs/; on the site, the examples are pages.

    The names of the reference become links.
    """
    for path in EXAMPLES:
        markdown = markdown.replace(f"](../examples/{path.name})", f"](examples/{path.stem}.md)")
    if page.file.src_uri == "reference.md":
        of_errors = set(groups()["Errors"])

        def link(match: re.Match[str]) -> str:
            name = match[1]
            target = f"reference/errors.md#{name.lower()}" if name in of_errors else page_of(name)
            return f"- [`{name}`]({target})"

        markdown = ENTRY.sub(link, markdown)
    return markdown
