"""Makes a transformers model's forward pass one flat function, with less overhead: at small batches
Python takes most of an iteration.

`torch.export` records what the model computes (without a compiler). Operations without effect go,
projections of one input become one product, and weights are bound as arguments. Attention stays a
call of ours.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.fx import Graph, GraphModule, Node

from services.worker.engines.torch.attention.attention import Attend

# (ids [1, T], positions [1, T], rows [N]) -> logits [1, N, vocabulary]
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]

aten = torch.ops.aten

_library: Any = library.Library("slackline", "DEF")  # type: ignore[no-untyped-call]
_library.define("attend(int layer, Tensor query, Tensor key, Tensor value, float? scale) -> Tensor")


def traced_attend(
    layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """Stands in for attention while the model is recorded: an operation without content."""
    attended: Tensor = torch.ops.slackline.attend(layer, query, key, value, scale)
    return attended


def _shape_only(
    _layer: int, query: Tensor, _key: Tensor, value: Tensor, _scale: float | None
) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


_library.impl("attend", _shape_only, "CompositeExplicitAutograd")


def flatten(
    call: Callable[..., Tensor], owner: torch.nn.Module, attend: Attend, device: torch.device
) -> Forward:
    """`call(ids, positions, rows)` runs `owner`'s forward pass on `device` with `traced_attend`.
    Merged projections become views of one matrix in `owner`, too. Raises torch.export's exception
    for a model that it cannot follow, ValueError where operations depend on the number of tokens.
    """

    class Entry(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owner = owner

        def forward(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
            return call(ids, positions, rows)

    dynamic = torch.export.Dim.DYNAMIC
    with torch.no_grad():
        exported = torch.export.export(
            Entry(),
            (
                torch.zeros(1, 6, dtype=torch.long, device=device),
                torch.arange(6, device=device)[None],
                torch.arange(3, device=device),
            ),
            dynamic_shapes={"ids": {1: dynamic}, "positions": {1: dynamic}, "rows": {0: dynamic}},
            strict=False,
        )
        if any(
            bounds.lower > 2 or bounds.upper < 1 << 30
            for bounds in exported.range_constraints.values()
        ):
            raise ValueError("what is computed depends on the number of tokens")
        module: GraphModule = exported.module()
        graph = module.graph
        _drop_idle(graph)
        _merge_projections(module)
        weights = _weights_as_arguments(module)
        _quicken(graph, attend)
    return _function(graph, weights)


def _function(graph: Graph, weights: Sequence[Tensor]) -> Forward:
    """A Python function, one operation a line, with a name for all that it calls: no look-ups."""
    names: dict[str, Any] = {}

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        if (
            value is None
            or isinstance(value, bool | int | str)
            or (isinstance(value, float) and math.isfinite(value))
        ):
            return repr(value)
        name = f"c{len(names)}"
        names[name] = value
        return name

    arguments = [node.name for node in graph.nodes if node.op == "placeholder"]
    last_use = {used: node for node in graph.nodes for used in node.all_input_nodes}
    called: dict[Any, str] = {}
    lines = [f"def forward({', '.join(arguments)}):"]
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f" return {text(node.all_input_nodes[0])}")
        elif node.op == "call_function":
            function = called.setdefault(node.target, f"f{len(called)}")
            given = [
                *map(text, node.args),
                *(f"{name}={text(value)}" for name, value in node.kwargs.items()),
            ]
            done = "".join(
                f"; {used.name} = None" for used in node.all_input_nodes if last_use[used] is node
            )
            lines.append(f" {node.name} = {function}({', '.join(given)}){done}")
        else:
            assert node.op == "placeholder", f"{node.op} was to be gone"
    names |= {name: function for function, name in called.items()}
    exec("\n".join(lines), names)  # noqa: S102 - written here, only from the graph
    forward = names["forward"]

    def run(ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return forward(ids, positions, rows, *weights)  # type: ignore[no-any-return]

    return run


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _idle(node: Node) -> bool:
    """Tells whether an operation returns its first argument unchanged."""
    if not node.args or not isinstance(node.args[0], Node):
        return False
    before, after = _value(node.args[0]), _value(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    same = (
        before.dtype == after.dtype
        and before.device == after.device
        and list(before.shape) == list(after.shape)
    )
    if node.target is aten.mul.Tensor:
        return same and isinstance(node.args[1], float) and node.args[1] == 1.0
    if node.target in (aten.slice.Tensor, aten.expand.default):
        return same and list(before.stride()) == list(after.stride())
    return same and node.target in (
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.dropout.default,
        aten.detach_.default,
    )


def _drop_idle(graph: Graph) -> None:
    seen: dict[tuple[Node, int], Node] = {}  # every layer makes the same views of its cosines
    for node in list(graph.nodes):
        # checks of the export itself
        if node.op == "call_module" or node.target is aten._assert_tensor_metadata.default:
            if node.users:
                raise ValueError(f"a call that the export left whole: {node.target}")
            graph.erase_node(node)
        elif node.op == "call_function" and _idle(node):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.unsqueeze.default:
            same = seen.setdefault((node.args[0], node.args[1]), node)
            if same is not node:
                node.replace_all_uses_with(same)
    graph.eliminate_dead_code()


def _parameter(module: GraphModule, node: Any) -> Tensor:
    """The parameter of a node. Raises ValueError if it is none."""
    found = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None
    if not isinstance(found, Tensor):
        raise ValueError(f"{node} is no weight")
    return found


def _merge_projections(module: GraphModule) -> None:
    """Merges linear layers of one input: one product, laid out to be fast, and views of it."""
    graph = module.graph
    by_input: dict[tuple[Node, bool], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is aten.linear.default and node.args[1].op == "get_attr":
            by_input[node.args[0], len(node.args) > 2 and node.args[2] is not None].append(node)
    for (source, biased), nodes in by_input.items():
        weights = [_parameter(module, node.args[1]) for node in nodes]
        columns = torch.cat(weights).t().contiguous()  # [inputs, outputs]
        sizes = [weight.shape[0] for weight in weights]
        for weight, own in zip(weights, torch.split_with_sizes(columns, sizes, 1), strict=True):
            weight.data = own.t()
        if len(nodes) == 1:
            continue
        name = f"merged_{nodes[0].name}"
        module.register_buffer(name, columns.t())
        if biased:
            module.register_buffer(
                f"{name}_bias", torch.cat([_parameter(module, node.args[2]) for node in nodes])
            )
        with graph.inserting_before(nodes[0]):
            arguments = [
                source,
                graph.get_attr(name),
                *([graph.get_attr(f"{name}_bias")] if biased else []),
            ]
            merged = graph.call_function(aten.linear.default, tuple(arguments))
            parts = graph.call_function(torch.split_with_sizes, (merged, sizes, -1))
            for n, node in enumerate(nodes):
                part = graph.call_function(operator.getitem, (parts, n))
                part.meta = dict(node.meta)
                node.replace_all_uses_with(part)
        for node in nodes:
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _weights_as_arguments(module: GraphModule) -> list[Tensor]:
    """Passes weights as arguments: look-ups in nested modules cost more than some operations."""
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    arguments: dict[str, Node] = {}
    weights = []
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        name = str(node.target)
        if name not in arguments:
            weights.append(_parameter(module, node).detach())
            with graph.inserting_after(last):
                last = arguments[name] = graph.placeholder(f"w{len(weights)}")
            last.meta = dict(node.meta)
        node.replace_all_uses_with(arguments[name])
        graph.erase_node(node)
    return weights


# The same operations through the cheapest entry into torch.
_QUICK: dict[Any, Callable[..., Any]] = {
    aten.linear.default: torch.nn.functional.linear,
    aten.add.Tensor: torch.add,
    aten.mul.Tensor: torch.mul,
    aten.sub.Tensor: torch.sub,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.cos.default: torch.cos,
    aten.sin.default: torch.sin,
    aten.cat.default: torch.cat,
    aten.silu.default: torch.nn.functional.silu,
    aten.relu.default: torch.relu,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten.reshape.default: torch.Tensor.reshape,
}


def _quicken(graph: Graph, attend: Attend) -> None:
    for node in list(graph.nodes):
        if node.target is torch.ops.slackline.attend.default:
            node.target = attend
        elif node.target is aten.slice.Tensor:
            size, (_, dim, start, end) = (
                _value(node.args[0]).shape,
                (*node.args, 0, 0, 2**63 - 1)[:4],
            )
            if (
                len(node.args) < 5
                and isinstance(size[dim], int)
                and isinstance(start, int)
                and isinstance(end, int)
            ):
                start, end, _ = slice(start, end).indices(size[dim])
                node.target, node.args = torch.narrow, (node.args[0], dim, start, end - start)
        elif (
            node.target is aten.mean.dim
            and len(node.args) == 3
            and list(node.args[1]) == [-1]
            and not node.kwargs
        ):
            with graph.inserting_before(node):  # torch.mean takes twice as long as torch.sum
                total = graph.call_function(torch.sum, (node.args[0], -1, node.args[2]))
            node.target, node.args = torch.mul, (total, 1.0 / int(_value(node.args[0]).shape[-1]))
        elif node.target is aten.pow.Tensor_Scalar and node.args[1] == 2:
            node.target, node.args = torch.mul, (node.args[0], node.args[0])
        elif (
            node.target is aten.add.Tensor
            and len(node.args) == 2
            and not node.kwargs
            and _product(node.args[1])
        ):
            product = node.args[1]
            node.target, node.args = torch.addcmul, (node.args[0], *product.args)
            graph.erase_node(product)
        elif node.target in _QUICK:
            node.target = _QUICK[node.target]


def _product(node: Any) -> bool:
    """The product of two tensors for one reader, in the type of their sum."""
    if (
        not isinstance(node, Node)
        or node.target not in (aten.mul.Tensor, torch.mul)
        or len(node.users) != 1
    ):
        return False
    values = [_value(node), *map(_value, node.args)]
    if not all(isinstance(value, Tensor) and value.dtype == values[0].dtype for value in values):
        return False
    return bool(_value(next(iter(node.users))).dtype == values[0].dtype)
