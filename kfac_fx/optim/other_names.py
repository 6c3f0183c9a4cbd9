"""Names of options of other optimizers, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

LEAVE_OUT = " Leave it out."
SCHEDULED = " Leave it out: a scheduler of torch.optim.lr_scheduler sets lr."
OF_COMPILE = " Leave it out: approximations= and layers= of kfac_fx.compile choose the blocks."
MICRO_BATCHES = " Leave it out: the forwards between two steps are the micro-batches of a step."
# Options of other optimizers, and what to write instead. Each has a counterpart of another name, or is near to the name
# of another option, which the error would suggest.
OTHER_NAMES: Mapping[str, str] = {
    # the optimizers of torch
    "betas": " Write momentum=... and second_moment_decay=... instead of betas.",
    "learning_rate": " Write lr=...; it is a factor, 1 by default, and not of the size of Adam's.",
    "eps": " Leave it out; rules that need it take a damping instead.",
    **dict.fromkeys(("amsgrad", "foreach", "fused", "capturable", "differentiable"), LEAVE_OUT),
    "nesterov": LEAVE_OUT,
    **dict.fromkeys(
        ("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),
        " Leave it out: step(closure) takes one step, and checks find its length.",
    ),
    "maximize": " Leave it out, and train minus the loss.",
    # K-FACs
    "kl_clip": " Write norm_constraint=...; it bounds the squared Fisher norm of a step.",
    **dict.fromkeys(("factor_update_steps", "factor_update_freq", "TCov"), " Write cov_update_every=...."),
    **dict.fromkeys(("inv_update_steps", "inv_update_freq", "kfac_update_freq", "TInv"), " Write invert_every=...."),
    **dict.fromkeys(
        ("update_freq", "precondition_frequency"), " Write cov_update_every=... or invert_every=..., or leave them out."
    ),
    "factor_decay": " Write cov_ema_decay=....",
    "decoupled": " Leave it out: weight_decay is decoupled.",
    # kfac-jax
    "initial_damping": " Write damping=....",
    "max_damping": " Leave it out: the damping has no upper bound.",
    "damping_lower_threshold": " Write damping_increase_rho_threshold=....",
    "damping_upper_threshold": " Write damping_decrease_rho_threshold=....",
    "reject_damping_increase_factor": LEAVE_OUT,
    "damping_schedule": " Leave it out, and set optimizer.damping between steps.",
    "momentum_schedule": " Leave it out, and set group['momentum'] of optimizer.param_groups between steps.",
    "learning_rate_schedule": SCHEDULED,
    "use_adaptive_damping": " Write adapt_damping=True, which the 'regular', 'adam' and 'qmodel' rules have.",
    **dict.fromkeys(
        ("use_adaptive_learning_rate", "use_adaptive_momentum"),
        " Write momentum_type='qmodel', which finds both the length of a step and its momentum.",
    ),
    "norm_constraint_mode": LEAVE_OUT,
    "inverse_update_period": " Write invert_every=....",
    **dict.fromkeys(("use_exact_inverses", "num_estimator_samples"), LEAVE_OUT),
    **dict.fromkeys(("distributed_precon_apply", "distributed_inverses"), " Write placement='owners'."),
    **dict.fromkeys(
        ("value_and_grad_func", "value_func_has_aux", "value_func_has_state", "value_func_has_rng"),
        " Leave it out: KFAC gets the net, and you call loss.backward().",
    ),
    **dict.fromkeys(
        ("register_only_generic", "patterns_to_skip", "auto_register_kwargs", "layer_tag_to_block_ctor"), OF_COMPILE
    ),
    # the K-FACs in PyTorch, asdl, and EKFAC
    **dict.fromkeys(
        ("curvature_ema", "stat_decay", "ema_decay", "cov_decay", "shampoo_beta"), " Write cov_ema_decay=...."
    ),
    "curvature_upd_interval": " Write cov_update_every=....",
    "preconditioner_upd_interval": " Write invert_every=....",
    "constraint_norm": " Write norm_constraint=....",
    "batch_averaged": " Write reduction='mean' or reduction='sum'.",
    "accumulation_steps": MICRO_BATCHES,
    "accumulate_data": MICRO_BATCHES,
    **dict.fromkeys(("assignment_strategy", "comm_method", "grad_worker_fraction"), " Write placement='owners'."),
    **dict.fromkeys(
        ("skip_layers", "ignore_modules", "precondition_modules"),
        " Leave it out: kfac_fx.compile(..., approximations={name: 'generic'}) gives a parameter a diagonal block.",
    ),
    **dict.fromkeys(("norm_shrink", "steps", "num_total_steps", "warmup_steps", "params_group"), LEAVE_OUT),
    # Shampoo, SOAP, and the optimizers of torch
    **dict.fromkeys(("max_preconditioner_dim", "max_precond_dim"), OF_COMPILE),
    "start_preconditioning_step": " Write num_burnin_steps=..., during which the parameters stand still.",
    "epsilon": " Leave it out; rules that need it take a damping instead.",
    **dict.fromkeys(("beta1", "momentum_beta"), " Write momentum=...."),
    "beta2": " Write second_moment_decay=....",
    **dict.fromkeys(
        ("use_decoupled_weight_decay", "decoupled_weight_decay", "weight_decay_type"),
        " Leave it out: weight_decay is decoupled.",
    ),
    "dampening": " Leave it out: momentum has none. If you mean the damping of the Fisher, write damping=....",
    **dict.fromkeys(("lr_decay", "warmup"), SCHEDULED),
    **dict.fromkeys(
        ("use_nesterov", "grafting", "inv_root_override", "beta2_decay", "momentum_decay", "ns_steps", "grad_clip"),
        LEAVE_OUT,
    ),
}
