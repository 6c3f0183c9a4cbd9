"""The Fisher: factors averaged over batches, blocks made of them, their inverses and bases, and who keeps them.

The docstring of `groups` states the normalization: A, G and the factor c of F = c A ⊗ G. Some uses need a word more:

- **Uses that do not depend on the batch**, as the projection of learned positions. Their output has one gradient row,
  the sum over the N cases, D = Σ_n d_n, and their N equal rows count as N rows. With sampled targets, and with random
  signs, the d_n are independent and have mean zero. So E[D Dᵀ] = Σ_n E[d_n d_nᵀ]: G is right in expectation, with more
  noise. The exact modes send back one case at a time for these. With true targets ("empirical") the products of two
  cases remain in a training, and the report gives the reason.
- **Generic parameters** have in a training the square of the batch's summed gradient over N, as TF K-FAC's naive
  blocks. For the same reason it is right in expectation under sampled targets, with more noise.

  A `FisherEstimator` that is called with batches, as in a fit, has no products of two examples: it takes one backward
  for every example for generic parameters, and with true targets for uses that do not depend on the batch.
- **Experts.** An expert sees the n rows that are routed to it. Its A is a mean over these rows. G is divided by the
  rows of all experts, and so contains the expert's share: the block is n / N · A ⊗ G with a mean G of its own rows.
- **Blocks without rows** are λ I. Their first rows make factors of their batch alone, and a lower c.

Every block has eigenvectors of its own structure except series, which are made dense for a spectrum; series that are
too wide for that are refused.

**Owners** (`placement`). Where one process owns a group of blocks, the others have the same group on the meta device.
So shapes, order and flags are the same everywhere, and no process asks another one what it has. Sums of a batch go to
the owner, symmetric matrices as triangles. The gradient, the momentum and the products of a parameter are with its
owner, too. Inner products are sums over processes, so all decide alike from the same numbers. A check of "adaptive"
evaluates the model at whole parameters in every process, so it also gathers the direction and, to see whether the loss
has risen, the parameters of the last check. A process has the tensors of its own blocks in its state, under the names
that they have in every process, so torch.distributed.checkpoint can divide them again among another number of
processes.
"""
