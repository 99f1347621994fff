"""Muon, an optimizer for the matrices of the layers, beside Adam for everything else.

Adam scales each number of a matrix for itself. Muon looks at the matrix as a map, and moves it by the same amount in
all directions of its gradient: the many in which the gradient is small are learned, too. `optimizer` builds it.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from transformer.compute import to_autocast_dtype

MOMENTUM = 0.95
RMS = 0.2  # of an update at rate 1: about that of Adam's, so that the same rates and weight decays suit both
# Five times a x + b x^3 + c x^5 takes singular values of 0.0015 to 1 to about 0.7 to 1.2 (Jordan et al., 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
AT_ONCE = 1 << 22  # numbers of the matrices that are computed together: an update holds about seven copies of them


class Muon(Optimizer):
    """Muon for `matrices` (Jordan et al., 2024), and fused AdamW for the groups of `others`.

    At rate r, with weight decay w, for a matrix W of shape (rows, columns) with gradient G:

        M <- 0.95 M + 0.05 G
        W <- (1 - r w) W - r 0.2 sqrt(max(rows, columns)) orthogonal(0.95 M + 0.05 G)

    The factor gives the update about the size of Adam's in matrices of any shape (Liu et al., 2025, "Muon is Scalable
    for LLM Training"). It is torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, with two differences: matrices of
    one shape are computed together, and where `found_inf` is set and not 0 nothing is changed, as fused Adam has it.
    Nothing here waits for the device.

    `others` has parameters and a weight decay in each group, as AdamW takes them.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[dict[str, Any]],
        *,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(
            [{"params": matrices, "weight_decay": weight_decay}, *others], {"lr": 0.0, "betas": betas, "eps": eps}
        )

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon moves, and not Adam."""
        matrices: list[nn.Parameter] = self.param_groups[0]["params"]
        return matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of everything that has a gradient."""
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in self.matrices:
            if matrix.grad is not None:
                by_shape.setdefault(matrix.shape, []).append(matrix)
        for shape, matrices in by_shape.items():
            count = max(1, AT_ONCE // shape.numel())
            for first in range(0, len(matrices), count):
                self._step_together(matrices[first : first + count])

        for group in self.param_groups[1:]:
            self._step_adam(group)

    def _step_adam(self, group: dict[str, Any]) -> None:
        """AdamW's update, by torch's fused kernel."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        of_each = [self.state[parameter] for parameter in parameters]
        for parameter, moments in zip(parameters, of_each, strict=True):
            if not moments:
                moments["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
                moments["exp_avg"] = torch.zeros_like(parameter)
                moments["exp_avg_sq"] = torch.zeros_like(parameter)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [moments["exp_avg"] for moments in of_each],
            [moments["exp_avg_sq"] for moments in of_each],
            [],
            [moments["step"] for moments in of_each],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _step_together(self, matrices: list[nn.Parameter]) -> None:
        """One update of `n` matrices of one shape."""
        rate, weight_decay = self.param_groups[0]["lr"], self.param_groups[0]["weight_decay"]
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])  # (n, rows, columns)
        is_skipped = gradients.new_zeros(()) if self.found_inf is None else self.found_inf.to(gradients.dtype)

        # The momentum. A gradient that is skipped may hold NaN, which no product with 0 takes away.
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["exp_avg"] = torch.zeros_like(matrix)
        means = [self.state[matrix]["exp_avg"] for matrix in matrices]
        mean = torch.stack(means)
        gradients = torch.where(is_skipped == 0.0, gradients, mean)
        mean = torch.lerp(mean, gradients, 1.0 - MOMENTUM)
        torch._foreach_copy_(means, list(mean.unbind()))

        # The matrices.
        is_applied = 1.0 - is_skipped
        updates = orthogonal(torch.lerp(gradients, mean, MOMENTUM))
        updates *= -rate * RMS * math.sqrt(max(gradients.shape[1:])) * is_applied
        weights = [matrix.data for matrix in matrices]
        torch._foreach_mul_(weights, 1.0 - rate * weight_decay * is_applied)
        torch._foreach_add_(weights, list(updates.unbind()))


def orthogonal(x: Tensor) -> Tensor:
    """Matrices `(n, rows, columns)`, each with its singular value decomposition `U S V^T` -> about `U V^T`.

    The singular values of the result are about 0.7 to 1.2, which serves as well as 1 and takes products alone; those
    below 0.0015 of the matrix's (Frobenius) norm stay smaller. The products are in autocast's type.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    y = x.mT if is_tall else x
    y = to_autocast_dtype(y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).contiguous()
    for _ in range(ITERATIONS):
        square = y @ y.mT  # (n, the shorter side, the shorter side)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return (y.mT if is_tall else y).to(x.dtype)
