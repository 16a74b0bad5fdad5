"""Run the models of ``transformers``: its modules, with opgraft's layers, ops and attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from opgraft.base.log import logger
from opgraft.base.text import described
from opgraft.binding.pluggable_class import PluggableClass
from opgraft.config import OpgraftConfig
from opgraft.distributed import get_pp_group, get_tensor_model_parallel_world_size
from opgraft.errors import DistributedError, ModelError
from opgraft.grafting import graft, ungraft
from opgraft.grafting.report import LeftAlone
from opgraft.models.decoder_experts import expert_sharing
from opgraft.models.description import architecture_config, joined, quantization_config
from opgraft.models.encoder import places_beside_padding
from opgraft.models.extras import import_extra
from opgraft.models.model import Model
from opgraft.models.stages import Stage
from opgraft.models.transformers_attention import (
    AttentionCall,
    Recorder,
    attach_layer,
    detach_layer,
    own_attention,
)
from opgraft.models.transformers_experts import ExpertLayers, ExpertsRecorder
from opgraft.models.transformers_layers import ParametersOnMeta, Replacer, materialise
from opgraft.models.transformers_names import TransformersNames
from opgraft.models.transformers_report import TransformersReport
from opgraft.models.transformers_stages import LayerChain, LayerRecorder, StageEnds, leave_out
from opgraft.models.trial_texts import fault_of, trial_texts
from opgraft.ops.attention import AttentionBatch, attending, current_batch
from opgraft.ops.attention.decoder import attention_layers
from opgraft.ops.embedding import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from torch import Tensor, nn

_KINDS = (None, "full_attention", "sliding_attention")
_FITTED_ROPES = {"dynamic", "longrope"}
_HEADS = (
    *("lm_head.*", "cls.*", "classifier.*", "pre_classifier.*", "score.*", "qa_outputs.*"),
    *("predictions.*", "*_predictions.*", "sop_classifier.*", "vocab_*", "mlm_head.*"),
)
"""Patterns of what checkpoints have behind the base model."""


GRAFT_INSTEAD = (
    "Next: load the model with transformers and call opgraft.graft(model), which leaves the model "
    "to transformers and replaces its layers by ops"
)
"""The way for a model that the engine cannot run."""


@dataclass(frozen=True)
class Examination:
    """The findings of a call of the model without memory.

    Attributes:
        stack: path of the module that gives hidden states, empty where that is the model itself.
        output: the class of its result.
        calls: path of an attention module → how it calls its function.
        uncached: why the model cannot run with a cache, empty if it can.
        names: changes of the names that checkpoints have.
        chain: its layers, which the stages of a pipeline share.
        experts: path of a module of experts → experts of a token.
    """

    stack: str
    output: type[Any]
    calls: Mapping[str, AttentionCall]
    uncached: str
    names: TransformersNames
    chain: LayerChain
    experts: Mapping[str, int]


def examine(cls: type[nn.Module], config: Any) -> Examination:
    """Construct a model without memory and call it with two tokens.

    Raises:
        ModelError: it cannot be constructed or called so.
    """
    config = copy.deepcopy(config)
    # With the other implementations, shapes depend on the chosen experts. Meta tensors choose none.
    config._experts_implementation = "batched_mm"
    with torch.device("meta"):
        mask = torch.zeros(1, 1, 2, 2)
        try:
            try:
                called = _construct_and_call(cls, config, mask)
            except Exception:  # some models refuse such a mask, and make their own
                called = _construct_and_call(cls, config, None)
        except Exception as error:  # the code of a model may raise anything
            version = import_extra("transformers").__version__
            raise ModelError(
                f"{cls.__name__} of transformers {version} cannot be examined without memory: "
                f"{described(error)}. {GRAFT_INSTEAD}"
            ) from error
    model = called.model
    paths = {module: path for path, module in model.named_modules()}
    calls = {paths[module]: call for module, call in called.attention.calls.items()}
    experts = {paths[module]: top_k for module, top_k in called.experts.choices.items()}
    stack, output = called.stack
    names = TransformersNames.of(model)
    return Examination(stack, output, calls, _uncached(model, calls), names, called.chain, experts)


class _CallFindings(NamedTuple):
    """The findings of a call.

    Attributes:
        model: the called model.
        attention: the calls of attention functions.
        experts: the calls of modules of experts.
        chain: the layers.
        stack: the path of the module that gives hidden states, and the class of the result.
    """

    model: Any
    attention: Recorder
    experts: ExpertsRecorder
    chain: LayerChain
    stack: tuple[str, type[Any]]


def _construct_and_call(cls: type[nn.Module], config: Any, mask: Tensor | None) -> _CallFindings:
    """Construct a model, and call it with two tokens."""
    model: Any = cls(config).eval()
    model.get_input_embeddings()  # raises if transformers does not know which they are
    recorder = Recorder(mask)
    recorder.attach(model)
    experts = ExpertsRecorder(model)
    stacks, layers = _called_stacks(model), LayerRecorder(model, mask)
    ids = torch.zeros(1, 2, dtype=torch.long)
    options = {"position_ids": ids} if _takes_positions(model) else {}
    with torch.no_grad():
        result = model(input_ids=ids, attention_mask=mask, use_cache=False, **options)
    # Inner models end before outer ones, so the last one is right below the whole.
    stack = stacks[-1] if stacks else ("", type(result))
    return _CallFindings(model, recorder, experts, layers.chain(), stack)


def _called_stacks(model: nn.Module) -> list[tuple[str, type[Any]]]:
    """Return a list of the models within a model, with the classes of their results.

    The list is empty at first. Each call of an inner model adds an entry when the call ends.
    """
    base = import_extra("transformers").PreTrainedModel
    ended: list[tuple[str, type[Any]]] = []

    def note(path: str) -> Callable[..., None]:
        return lambda module, arguments, result: ended.append((path, type(result)))

    for path, module in model.named_modules():
        if path and isinstance(module, base):
            module.register_forward_hook(note(path))
    return ended


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _first_position(model: nn.Module) -> int:
    """Return the row of the position embeddings for the first token.

    In RoBERTa and its relatives, the rows up to the one of the padding are not used.
    """
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module.padding_idx is None:
            continue
        name = path.rpartition(".")[2]
        if "position" in name:
            return module.padding_idx + 1
    return 0


def _uncached(model: Any, calls: Mapping[str, AttentionCall]) -> str:
    """Return the reason why a model cannot run with a cache, or an empty text.

    With a cache, tokens may influence each other in the recorded calls of attention only.
    """
    config = model.config.get_text_config()
    for path, call in calls.items():
        if call.refused:
            return f"{path}: {call.refused}"
    layers = getattr(config, "num_hidden_layers", None)
    # A layer without a call attends in code of its own, or mixes tokens in another way.
    if len(calls) != layers:
        return (
            f"{len(calls)} of {layers} layers call their attention through transformers' registry"
        )
    fault = _fault_of_kinds(config, calls)
    if fault:
        return fault
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            return f"{path} is a convolution over tokens"
        ropes = getattr(module, "rope_type", None)
        kinds = set(ropes.values()) if isinstance(ropes, dict) else {ropes}
        if kinds & _FITTED_ROPES:
            return f"{path} rotates for the longest sequence of a batch"
    return "" if _takes_positions(model) else "it takes no positions"


def _fault_of_kinds(config: Any, calls: Mapping[str, AttentionCall]) -> str:
    """Return a reason if a layer has an unknown kind, or a window against its kind."""
    usual = None if getattr(config, "sliding_window", None) is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * len(calls)
    for (path, call), kind in zip(calls.items(), kinds, strict=True):
        if kind not in _KINDS:
            return f"{path} is of the kind {kind!r}"
        slides = kind == "sliding_attention"
        if kind and slides != (call.sliding_window is not None):
            return f"{path} is of the kind {kind!r} and passes the window {call.sliding_window}"
    return ""


def _refusal_of(model: nn.Module, reason: str) -> ModelError:
    """Make the error about a model of transformers that cannot run here."""
    return ModelError(f"{type(model).__name__}: {reason}. {GRAFT_INSTEAD}")


@PluggableClass.register("TransformersModel")
class TransformersModel(Model):
    """A base model of transformers, such as an encoder: token ids to hidden states.

    The model is constructed without memory. Linear layers and the embedding become opgraft's
    layers, cut by the plan of the model's config. Attention modules call ``Attention`` or
    ``MMEncoderAttention``. ``graft`` replaces the rest. The paths of modules and the names of
    weights stay.

    Args:
        opgraft_config: the ``model`` section names the architecture's config, or a checkpoint with
            a config.
        prefix: the path of this model in a larger one.

    Attributes:
        report: the replaced modules, and the modules that stayed, with reasons.

    Raises:
        ModelError: transformers has no such model, or the model cannot run here, or the number of
            heads is no multiple of the number of ranks.
    """

    transformers_model: Any
    """The model of transformers; not a child, since its weights would be listed twice."""
    uncached: str
    """The reason why transformers runs the model, one text at a time; else an empty text."""
    packs: bool = False
    """A call may have several whole texts. ``try_texts`` finds out."""
    stage: Stage
    gate: StageEnds | None = None
    _elsewhere: Sequence[str] = ()

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        # Constructors of transformers write into the config.
        config = copy.deepcopy(self.config or architecture_config(opgraft_config))
        cls = transformers_class(config.architectures or ())
        self.config = config
        self.examination = examine(cls, config)
        self.prefix = prefix
        names = self.examination.names
        self.weights_mapper = replace(names, experts=frozenset(self.examination.experts))
        with ParametersOnMeta():
            model = cls(config).eval().requires_grad_(False)
        if model.base_model is model:
            self.ignored_weights = _HEADS
        self.report = self._adapt(model)
        # Both models share the dictionaries: a module that is replaced in one is replaced in both.
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = vars(model)[name]
        self.__dict__["transformers_model"] = model
        self.uncached = self.examination.uncached
        self.first_position = _first_position(self.stack)
        # With a cache, a call may begin inside a text.
        self._has_whole_texts = not attention_layers(self)

    @property
    def stack(self) -> Any:
        """The module of transformers that gives hidden states."""
        return self.transformers_model.get_submodule(self.examination.stack)

    def _adapt(self, model: Any) -> TransformersReport:
        """Replace layers, give memory to the rest, graft, and attach attention."""
        model.tie_weights()
        calls = self.examination.calls
        plan = self._plan(model)
        # A sink is a number of one head, and the plan does not cut sinks.
        whole = {path: "attention has sinks" for path, call in calls.items() if call.sinks}
        quantization = quantization_config(self.opgraft_config, self)
        replacer = Replacer(model, plan, whole, quantization, self.prefix)
        # Before layers of other stages go: afterwards their paths lead nowhere.
        ranks = {path: self._ranks(replacer, path, call) for path, call in calls.items()}
        replacer.embeddings(*self._cut(model))
        self._replace_experts(model, replacer, quantization)
        replacer.linears()
        undefined = list(materialise(model))
        if undefined:
            raise _refusal_of(model, f"nothing computes the buffers {', '.join(undefined[:5])}")
        attached = self._attach(model, ranks)
        # Last, as graft replaces whatever still is a module of torch or transformers.
        grafted = graft(model)
        kept = (*replacer.left, *self._kept_whole(model, plan))
        return TransformersReport(tuple(replacer.cuts), kept, attached, grafted)

    def _replace_experts(self, model: Any, replacer: Replacer, quantization: Any) -> None:
        """Replace modules of experts, and have their weights loaded one by one."""
        found = self.examination
        sharing = expert_sharing(self.opgraft_config)
        replacer.experts(found.experts, ExpertLayers(quantization, sharing))
        here = {path for path, _ in model.named_modules()}
        elsewhere = found.experts.keys() - here
        # A module that stays takes the one tensor of transformers.
        self.weights_mapper = replace(found.names, experts={*replacer.experts_paths, *elsewhere})

    def _plan(self, model: Any) -> dict[str, str]:
        """Return the plan of the config, with the paths of the whole model."""
        base = ""
        for name, part in model.named_modules():
            if part is model.base_model and name:
                base = f"{name}."
                break
        styles = self.config.base_model_tp_plan or {}
        return {base + path: style for path, style in styles.items()}

    def _attach(self, model: Any, ranks: Mapping[str, int]) -> tuple[str, ...]:
        """Have attention modules call our layers; return the paths of these modules.

        Args:
            model: with memory.
            ranks: path of an attention module → ranks that share the heads.
        """
        if self.examination.uncached:
            return ()
        elsewhere = tuple(f"{path}." for path in self._elsewhere)
        attached = []
        for path, call in self.examination.calls.items():
            if path.startswith(elsewhere):
                continue
            module = model.get_submodule(path)
            sinks = module._parameters[call.sinks] if call.sinks else None
            layer = call.layer(ranks[path], sinks, joined(self.prefix, path))
            attach_layer(module, layer)
            attached.append(path)
        return tuple(attached)

    def _kept_whole(self, model: Any, plan: Mapping[str, str]) -> Iterator[LeftAlone]:
        """Yield the remarks of the report on the whole model."""
        name = type(model).__name__
        # On one rank, everything is whole anyway.
        if not plan and get_tensor_model_parallel_world_size() > 1:
            yield LeftAlone("", name, "its config has no plan: whole on every rank")
        if self.examination.uncached:
            reason = f"it runs without a cache: {self.examination.uncached}"
            yield LeftAlone("", name, reason)

    def _cut(self, model: Any) -> tuple[Any, Any]:
        """Leave out the parts of other stages. Return the embedding and the head of this stage.

        A part of another stage is returned as ``None``.

        Raises:
            DistributedError: there are several stages, and the model cannot be cut into stages.
        """
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if get_pp_group().world_size == 1:
            return embedding, head
        paths = {module: path for path, module in model.named_modules()}
        # A model without a head returns None, which has no path.
        heads = [f"{paths[each]}.weight" for each in (head, embedding) if each in paths]
        others = self._cut_layers(model, heads, embedding.weight.shape[1])
        stage = self.stage
        is_tied = head is not None and head.weight is embedding.weight
        has_embedding = stage.is_first or (stage.is_last and is_tied)
        absent = []
        if not has_embedding and embedding in paths:
            absent.append(paths[embedding])
        if not stage.is_last and head in paths:
            absent.append(paths[head])
        _replace_by_nothing(model, absent)
        self._elsewhere = [*others, *absent]
        return (embedding if has_embedding else None), (head if stage.is_last else None)

    def _cut_layers(self, model: Any, heads: Sequence[str], width: int) -> list[str]:
        """Leave out the layers of other stages, and return their paths.

        Args:
            model: the whole model.
            heads: the names of weights of embedding and head.
            width: elements of a hidden state.

        Raises:
            DistributedError: the model cannot be cut into stages.
        """
        chain = self.examination.chain
        if chain.uncut:
            raise DistributedError(
                f"{type(model).__name__} of transformers is not cut into stages: {chain.uncut}. "
                "Use parallel.tensor"
            )
        layers = model.get_submodule(chain.path)
        self.stage = Stage.of(self, chain.path, len(layers), heads)
        self.gate = leave_out(layers, self.stage, chain.results, width)
        numbers = [number for number in range(len(layers)) if number not in self.stage.layers]
        return [f"{chain.path}.{number}" for number in numbers]

    def parts_elsewhere(self) -> Collection[str]:
        """Return the names of the parts that other stages have."""
        return self._elsewhere

    def _ranks(self, replacer: Replacer, path: str, call: AttentionCall) -> int:
        """Return the number of ranks that share the heads of an attention module.

        Raises:
            ModelError: the number of heads is no multiple of the number of ranks.
        """
        ranks = get_tensor_model_parallel_world_size() if replacer.is_cut(path) else 1
        call.check(ranks, path)
        return ranks

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """Return hidden states ``[tokens, hidden_size]`` of ids and positions ``[tokens]``.

        The tokens are the tokens of the current ``AttentionBatch``. Without a batch, they are one
        sequence. All stages but the last return the ``inputs_embeds`` of the next stage,
        ``[1, tokens, hidden_size]``.

        Raises:
            ModelError: there is a batch, and the model cannot run with a cache.
        """
        if self.uncached and current_batch() is not None:
            reason = f"it cannot run with a cache of ours: {self.uncached}"
            raise _refusal_of(self.transformers_model, reason)
        if self.gate is not None:
            inputs_embeds = self.gate.enter(inputs_embeds)
        options: dict[str, Any] = {}
        if inputs_embeds is not None:
            options["inputs_embeds"] = inputs_embeds[None]
        elif input_ids is not None:
            options["input_ids"] = input_ids[None]
        if not self.uncached:  # otherwise transformers counts the positions itself
            options["position_ids"] = self._places(input_ids, positions)[None]
            # A given mask, even an empty one, keeps transformers from making masks.
            options["attention_mask"] = positions.new_empty(1, 1, 0, 0)
        output: Tensor = self.stack(**options, use_cache=False)[0]
        return output[0] if self.gate is None else self.gate.leave(output[0])

    def _places(self, input_ids: Tensor | None, positions: Tensor) -> Tensor:
        """Return the positions that transformers gives the tokens."""
        counts_padding = not self.first_position or not self._has_whole_texts
        if input_ids is None or counts_padding:
            return positions + self.first_position
        return places_beside_padding(input_ids, positions, self.first_position - 1)

    def try_texts(self, device: torch.device) -> None:
        """Compare the hidden states of two short texts with those of transformers.

        If the states of a text alone differ, transformers runs the model from now on. If only the
        states of two texts in one call differ, texts are computed one by one. The trial is needed
        because some models mix tokens outside of attention, and some count positions differently.

        Args:
            device: the device of the model.
        """
        if self.uncached or self.gate is not None:
            return
        alone, together = self._tried(device)
        if alone:
            self._run_as_it_is(alone)
        elif together:
            self._keep(f"it takes texts one by one: of two in one call {together}")
        self.packs = not alone and not together

    @torch.inference_mode()
    def _tried(self, device: torch.device) -> tuple[str, str]:
        """Return the fault of the states of texts alone, and of texts in one call.

        A text without a fault is empty.
        """
        texts = trial_texts(self.config.get_text_config(), self.max_position, device)
        positions = [torch.arange(len(text), device=device) for text in texts]
        with own_attention():
            expected = [self.stack(input_ids=text[None], use_cache=False)[0][0] for text in texts]

        def one_by_one() -> list[Tensor]:
            return [self(*given) for given in zip(texts, positions, strict=True)]

        def in_one_call() -> list[Tensor]:
            lengths = [len(text) for text in texts]
            with attending(AttentionBatch.of_sequences(lengths, device=device)):
                states: Tensor = self(torch.cat(texts), torch.cat(positions))
            return list(torch.split(states, lengths))

        alone = fault_of(one_by_one, expected)
        if attention_layers(self):
            return alone, "each needs a cache"
        return alone, alone or fault_of(in_one_call, expected)

    def _run_as_it_is(self, reason: str) -> None:
        """Give attention back to transformers, since the states have differed."""
        self.uncached = reason
        model = self.transformers_model
        for path in self.report.attention:
            detach_layer(model.get_submodule(path))
        # Without attention, more or fewer modules can be grafted than before.
        ungraft(model)
        self.report = replace(self.report, attention=(), grafted=graft(model))
        self._keep(f"it runs without a cache: {reason}")

    def _keep(self, reason: str) -> None:
        """Add a line to the report about the whole model."""
        row = LeftAlone("", type(self.transformers_model).__name__, reason)
        logger.info("%s: %s", row.source, reason)
        self.report = replace(self.report, kept=(*self.report.kept, row))


class _HiddenStates(nn.Module):
    """A substitute for the stack of a model, to call only the layers behind the stack."""

    def __init__(self, output: type[Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return self.output(last_hidden_state=inputs_embeds)


class _Logits(nn.Module):
    """The output layer, as transformers calls the layer.

    On ranks that do not gather logits, the result has no column.
    """

    def __init__(self, head: VocabParallelEmbedding, processor: LogitsProcessor) -> None:
        super().__init__()
        self.head = head
        self.processor = processor

    @property
    def weight(self) -> Tensor:
        return self.head.get_parameter("weight")

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor | None = self.processor(self.head, hidden_states)
        return hidden_states[..., :0] if logits is None else logits


@PluggableClass.register("TransformersForCausalLM")
class TransformersForCausalLM(TransformersModel):
    """A decoder of transformers with its logits; see ``TransformersModel``."""

    stage_streams: ClassVar[int] = 1
    behind_stack: Any
    """A view of the model with a stack that returns its input; not a child either."""

    def __init__(self, *, opgraft_config: OpgraftConfig, prefix: str = "") -> None:
        super().__init__(opgraft_config=opgraft_config, prefix=prefix)
        self.logits_processor = LogitsProcessor(self.config.get_text_config().vocab_size)
        found = self.examination
        model = _with(self.transformers_model, found.stack, _HiddenStates(found.output))
        for name, module in self._modules.items():
            if isinstance(module, ParallelLMHead):
                model = _with(model, name, _Logits(module, self.logits_processor))
        self.__dict__["behind_stack"] = model

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return logits ``[rows, vocab_size]`` of hidden states.

        All layers of transformers behind the stack are called, with their scales and caps. Ranks
        that do not gather logits return ``None``.
        """
        # transformers wants a dimension for the batch.
        output = self.behind_stack(inputs_embeds=hidden_states[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits if logits.shape[-1] else None


def _replace_by_nothing(model: nn.Module, paths: Sequence[str]) -> None:
    """Replace the modules at these paths by empty modules."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = nn.Module()


def _with(module: nn.Module, path: str, child: nn.Module) -> nn.Module:
    """Return a view of a module, with the same tensors, in which ``child`` stands at ``path``."""
    name, _, rest = path.partition(".")
    view: nn.Module = object.__new__(type(module))  # nobody has the arguments of its constructor
    inner = module._modules[name]
    placed = _with(inner, rest, child) if rest and inner is not None else child
    view.__dict__.update(vars(module), _modules={**module._modules, name: placed})
    return view


def transformers_class(architectures: Any) -> type[nn.Module]:
    """Return the class of transformers for the first architecture.

    Raises:
        ModelError: transformers does not have any of the architectures.
    """
    transformers = import_extra("transformers")
    for name in architectures:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    names = ", ".join(architectures) or "(none named)"
    raise ModelError(f"transformers {transformers.__version__} has no model {names}")
