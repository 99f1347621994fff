"""Muon, an optimizer for the matrices of the layers, beside Adam for everything else.

Adam scales each element of a matrix separately. Muon treats the matrix as a linear map, and moves it equally far in all
directions of its gradient, so the many directions in which the gradient is small are learned, too. `optimizer` builds
it.
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
AT_ONCE = 2**22  # numbers of the matrices that are computed together: an update holds about seven copies of them

# a x + b x^3 + c x^5, applied five times, takes a singular value between 0.0015 and 1 to one between about 0.7 and 1.2
# (Jordan et al., 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(Optimizer):
    """Muon for `matrices` (Jordan et al., 2024), and fused AdamW for the groups of `others`.

    At rate r, with weight decay w, for a matrix W of shape (rows, columns) with gradient G:

        M <- 0.95 M + 0.05 G
        W <- (1 - r w) W - r 0.2 sqrt(max(rows, columns)) orthogonal(0.95 M + 0.05 G)

    The factor gives the update about the size of Adam's in matrices of any shape (Liu et al., 2025, "Muon is Scalable
    for LLM Training"). It is torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, with three differences: matrices
    of one shape are computed together, their products are in autocast's type and not always in bf16, and an update can
    be skipped. Nothing here waits for the device.

    `others` has parameters and a weight decay in each group, as AdamW takes them. `betas` and `eps` are Adam's.
    """

    found_inf: Tensor | None = None  # a scalar; 1 skips an update: weights and moments stay, as in torch's fused Adam

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[dict[str, Any]],
        *,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        groups = [{"params": matrices, "weight_decay": weight_decay}, *others]
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps})

    @property
    def matrices(self) -> list[nn.Parameter]:
        """The parameters that Muon moves, and not Adam."""
        matrices: list[nn.Parameter] = self.param_groups[0]["params"]
        return matrices

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of everything that has a gradient."""
        # Muon, for the matrices of one shape together.
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in self.matrices:
            if matrix.grad is not None:
                by_shape.setdefault(matrix.shape, []).append(matrix)

        for shape, matrices in by_shape.items():
            count = max(1, AT_ONCE // shape.numel())
            for first in range(0, len(matrices), count):
                self._step_muon(matrices[first : first + count])

        # Adam, for everything else.
        for group in self.param_groups[1:]:
            self._step_adam(group)

    def _step_muon(self, matrices: list[nn.Parameter]) -> None:
        """Muon's update of `n` matrices of one shape."""
        rate = self.param_groups[0]["lr"]
        weight_decay = self.param_groups[0]["weight_decay"]
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])  # (n, rows, columns)

        # 1, or 0 on the device where the update is skipped.
        applied = gradients.new_ones(()) if self.found_inf is None else 1.0 - self.found_inf.to(gradients.dtype)

        # The momentum. The gradient of a skipped update may hold NaN, which no product with 0 takes away.
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["exp_avg"] = torch.zeros_like(matrix)
        means_before = [self.state[matrix]["exp_avg"] for matrix in matrices]
        means = torch.stack(means_before)
        gradients = torch.where(applied == 1.0, gradients, means)
        means = torch.lerp(means, gradients, 1.0 - MOMENTUM)
        torch._foreach_copy_(means_before, list(means.unbind()))

        # The matrices.
        updates = orthogonal(torch.lerp(gradients, means, MOMENTUM))
        updates *= -rate * RMS * math.sqrt(max(gradients.shape[1:])) * applied
        weights = [matrix.data for matrix in matrices]
        torch._foreach_mul_(weights, 1.0 - rate * weight_decay * applied)
        torch._foreach_add_(weights, list(updates.unbind()))

    def _step_adam(self, group: dict[str, Any]) -> None:
        """AdamW's update, by torch's fused kernel."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)

        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],  # the largest squares so far, of AMSGrad
            [state["step"] for state in states],
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
