"""The kernels of few rows and of experts under Triton's interpreter, against float64.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools

import torch

from pie_driver_sglang.kernels.gemm.small_m import find_small_m_config, small_m_gemm, start_residual
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    LinearWeights,
    Norm,
    Residual,
    TileConfig,
    Workspace,
)
from pie_driver_sglang.kernels.moe.experts import (
    Experts,
    add_moe,
    expert_gemm,
    find_expert_configs,
    max_rows,
)
from pie_driver_sglang.kernels.moe.routing import (
    MAX_UNLISTED_ROWS,
    Router,
    Routing,
    route,
    routing_workspace_sizes,
)

ROWS = (1, 5, 16, 20)
TOLERANCE = 1e-5
EPSILON = 1e-6


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Up to rounding in float32."""
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < TOLERANCE, error


def make_workspace() -> Workspace:
    """With parts that no sum may contain."""
    return Workspace(torch.full((100_000,), torch.nan), torch.zeros(256, dtype=torch.int32))


def normalized(rows: torch.Tensor) -> torch.Tensor:
    """In float64, without weights."""
    rows = rows.double()
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON)


def check_sum_squares(stream: Residual) -> None:
    """The sums of squares are those of the rows."""
    close(stream.sum_squares.sum(1), stream.rows.double().square().sum(1))


def check_products() -> None:
    """Products that scale, gate and add, of any number of rows, whole and in parts."""
    for count, parts, stages in itertools.product(ROWS, (1, 2), (1, 3)):
        if (count, stages) in ((1, 3), (16, 1), (20, 3)):
            continue
        block_m = 1 if count == 1 else 16 if count <= 16 else 32
        workspace, config = make_workspace(), TileConfig(block_m, 16, 32, parts, num_stages=stages)
        rows, matrix = torch.randn(count, 128), LinearWeights(torch.randn(96, 128))
        stream = start_residual(rows, 3)
        check_sum_squares(stream)
        exact = rows.double() @ matrix.weight.double().T
        # Rows may lie in something wider.
        wider = torch.cat([rows, rows], 1)[:, :128]
        close(small_m_gemm(wider, matrix, config, workspace), exact)
        scaled = normalized(rows) @ matrix.weight.double().T
        found = small_m_gemm(
            rows, matrix, config, workspace, sum_squares=stream.sum_squares, epsilon=EPSILON
        )
        close(found, scaled)
        gate, up = scaled.chunk(2, dim=-1)
        found = small_m_gemm(
            rows,
            matrix,
            config,
            workspace,
            sum_squares=stream.sum_squares,
            epsilon=EPSILON,
            swiglu=True,
        )
        close(found, torch.nn.functional.silu(gate) * up)
        before = torch.randn(count, 96)
        into = Residual(before.clone(), torch.full((count, 6), torch.nan))
        assert small_m_gemm(rows, matrix, config, workspace, residual=into) is into.rows
        close(into.rows, before.double() + exact)
        check_sum_squares(into)
        assert not workspace.semaphores.any()


def check_shapes() -> None:
    """Shapes of models whose layers are of other sizes than any that was measured."""
    for rows, (outputs, inputs) in itertools.product((1, 3), ((96, 64), (48, 80))):
        for epilogue in (STORE, ADD_RESIDUAL):
            config = find_small_m_config(rows, outputs, inputs, epilogue)
            assert config is not None
            assert config.fits(outputs, inputs)
            x, matrix = torch.randn(rows, inputs), LinearWeights(torch.randn(outputs, inputs))
            found = small_m_gemm(x, matrix, config, make_workspace())
            close(found, x.double() @ matrix.weight.double().T)


def mixed(rows: torch.Tensor, norm: Norm, experts: Experts) -> tuple[torch.Tensor, ...]:
    """The rows with what their experts add; the experts and their weights. In float64."""
    given = normalized(rows) * norm.weight.double()
    chances = torch.softmax(given @ experts.router.weight.double().T, -1)
    weights, chosen = chances.topk(experts.router.top_k, -1)
    if experts.router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = rows.double()
    for row, turn in itertools.product(range(len(rows)), range(experts.router.top_k)):
        number = chosen[row, turn]
        gate, up = (experts.gate_up[number].double() @ given[row]).chunk(2)
        middle = torch.nn.functional.silu(gate) * up
        out[row] += weights[row, turn] * (experts.down[number].double() @ middle)
    return out, chosen, weights


def make_experts(total: int, chosen: int, width: int, middle: int, *, normalized: bool) -> Experts:
    """Random ones."""
    gate_up = torch.randn(total, 2 * middle, width) * width**-0.5
    router = Router(torch.randn(total, width), chosen, normalized)
    return Experts(router, gate_up, torch.randn(total, width, middle))


def clear(routing: Routing) -> None:
    """What the last kernel of a layer does."""
    if routing.lists is not None:
        routing.lists.counts.zero_()


def check_experts() -> None:
    """Few experts and many, as many as are chosen, and numbers that are no powers of two."""
    shapes = ((12, 3, 96, 64, True), (4, 4, 64, 32, False), (20, 8, 80, 48, True))
    counts = ((1, 2, 3, 20), (1, 3, 20), (2, 4))
    cases = [(each, *shape) for shape, some in zip(shapes, counts, strict=True) for each in some]
    for count, total, chosen, width, middle, sums in cases:
        experts = make_experts(total, chosen, width, middle, normalized=sums)
        norm, workspace = Norm(torch.rand(width) + 0.5, EPSILON), make_workspace()
        rows = torch.randn(count, width)
        exact, ids, weights = mixed(rows, norm, experts)
        stream = start_residual(rows.clone(), 5)
        routing = route(stream, norm, experts.router, workspace)
        assert torch.equal(routing.experts, ids.int())
        close(routing.weights, weights)
        close(routing.rows, normalized(rows) * norm.weight.double())
        clear(routing)
        after = add_moe(stream, norm, experts, workspace)
        assert after.rows is stream.rows
        close(after.rows, exact)
        check_sum_squares(after)
        assert not workspace.semaphores.any()


def check_lists() -> None:
    """Pairs of each expert are listed once; sums of squares may be unknown."""
    experts = make_experts(37, 5, 208, 16, normalized=True)
    rows, norm = torch.randn(40, 208), Norm(torch.rand(208) + 0.5, EPSILON)
    workspace = make_workspace()
    floats, counters = routing_workspace_sizes(40, 37)
    assert floats <= len(workspace.partial_sums)
    assert counters <= len(workspace.semaphores)
    exact, ids, weights = mixed(rows, norm, experts)
    unknown = Residual(rows.clone(), torch.empty(40, 0))
    routing = route(unknown, norm, experts.router, workspace)
    assert torch.equal(routing.experts, ids.int())
    close(routing.weights, weights)
    assert routing.lists is not None
    for number, (pairs, count) in enumerate(zip(*routing.lists, strict=True)):
        assert sorted(pairs[:count].tolist()) == (ids.flatten() == number).nonzero()[:, 0].tolist()
    clear(routing)
    close(add_moe(unknown, norm, experts, workspace).rows, exact)


def check_ties() -> None:
    """Of experts with equal logits, also of below zero, the first ones are chosen."""
    experts = make_experts(12, 3, 64, 32, normalized=True)
    weight = experts.router.weight[:1].repeat(12, 1)
    experts = experts._replace(router=experts.router._replace(weight=weight))
    for count in (MAX_UNLISTED_ROWS, 6, 20):
        stream = start_residual(torch.randn(count, 64), 1)
        routing = route(stream, Norm(torch.ones(64), EPSILON), experts.router, make_workspace())
        assert (routing.experts == torch.arange(3)).all()
        close(routing.weights, torch.full((count, 3), 1 / 3, dtype=torch.float64))


def check_one_expert_of_many_rows(count: int) -> None:
    """More pairs of an expert than a program computes at once."""
    experts = make_experts(5, 2, 64, 32, normalized=True)
    weight = experts.router.weight
    weight[2:] = -weight[:1]
    weight[1] = weight[0]
    norm = Norm(torch.ones(64), EPSILON)
    rows = weight[:1] + 0.01 * torch.randn(count, 64)
    exact, ids, _ = mixed(rows, norm, experts)
    assert sorted(ids.unique().tolist()) == [0, 1]
    close(add_moe(start_residual(rows.clone(), 1), norm, experts, make_workspace()).rows, exact)


def check_cuts() -> None:
    """Cuts fit, and pairs are computed alone up to some rows."""
    experts = make_experts(3, 2, 96, 64, normalized=True)
    for rows in (1, MAX_UNLISTED_ROWS, MAX_UNLISTED_ROWS + 1, 64):
        configs = find_expert_configs(rows, experts)
        assert configs is not None
        assert configs[0].fits(64, 96)
        assert configs[1].fits(96, 64)
    assert find_expert_configs(1, make_experts(3, 2, 90, 64, normalized=True)) is None
    # Of the Qwen3-30B-A3B and of Mixtral: of more rows an expert would have too many pairs.
    assert max_rows(make_experts(128, 8, 2, 1, normalized=True)) == 256
    assert max_rows(make_experts(8, 2, 2, 1, normalized=True)) == 64
    routing = Routing(
        torch.randn(MAX_UNLISTED_ROWS, 96),
        torch.tensor([[2, 0]] * MAX_UNLISTED_ROWS, dtype=torch.int32),
        torch.ones(MAX_UNLISTED_ROWS, 2),
    )
    found = expert_gemm(
        torch.randn(2 * MAX_UNLISTED_ROWS, 64),
        experts.down,
        routing,
        TileConfig(1, 16, 32, num_stages=1),
        swiglu=False,
    )
    assert found.shape == (2 * MAX_UNLISTED_ROWS, 96)


if __name__ == "__main__":
    torch.manual_seed(4)
    check_products()
    check_shapes()
    check_experts()
    check_ties()
    # More than the 16 pairs that a program computes at once, and than 32.
    for many in (20, 37):
        check_one_expert_of_many_rows(many)
    check_lists()
    check_cuts()
    print("all close")
