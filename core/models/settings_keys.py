"""The fate of each key of a settings file of transformers, sentence-transformers or llama.cpp.

A key is read, refused by name, or irrelevant, for the reason in its row. Nobody reads other keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class SettingsKey:
    """One key of a settings file.

    Attributes:
        name: the name of the key, or a pattern with ``*``.
        fate: "read"; "refused", except for ``harmless`` values; or "irrelevant".
        why: the meaning of the key, or the reason for its fate.
        harmless: values of a refused key that change nothing.
    """

    name: str
    fate: str
    why: str
    harmless: tuple[object, ...] = ()


def _rows_of_keys(
    fate: str, why: str, names: Sequence[str], harmless: Sequence[object] = ()
) -> tuple[SettingsKey, ...]:
    rows = []
    for name in names:
        rows.append(SettingsKey(name, fate, why, tuple(harmless)))
    return tuple(rows)


def _keys(why: str, *names: str) -> tuple[SettingsKey, ...]:
    return _rows_of_keys("read", why, names)


def _irrelevant(why: str, *names: str) -> tuple[SettingsKey, ...]:
    return _rows_of_keys("irrelevant", why, names)


def _refused_keys(
    why: str, *names: str, harmless: Sequence[object] = ()
) -> tuple[SettingsKey, ...]:
    return _rows_of_keys("refused", why, names, harmless)


SHAPING = (
    "add_prefix_space",
    "do_lower_case",
    "strip_accents",
    "tokenize_chinese_chars",
    "legacy",
    "do_lowercase",
    "do_lowercase_and_remove_accent",
    "keep_accents",
    "remove_space",
    "split_by_punct",
    "clean_text",
    "wordpieces_prefix",
    "unk_id",
    "extra_ids",
    "offset",
    "src_lang",
    "tgt_lang",
    "legacy_behaviour",
    "language",
    "task",
    "predict_timestamps",
    "fix_mistral_regex",
    "auto_map",
)
"""Keys of ``tokenizer_config.json`` for changes that transformers makes to ``tokenizer.json``."""

_NO_PADDING = "each text is computed without padding"
_NO_PYTHON = "only tokenizers that are written in Python read it, and these are refused"
_PAIRS = "it is for documents with boxes, labels or entities, and prompts are plain texts"
_SAVED = "it records how the tokenizer was saved or found"
_PARSING = "it is for reading answers or for texts that opgraft does not check"

TOKENIZER_CONFIG: tuple[SettingsKey, ...] = (
    *_keys(
        "a special token",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    ),
    *_keys("a special token of the model's own, if the value is a text", "*_token"),
    *_keys(
        "more special tokens",
        "additional_special_tokens",
        "extra_special_tokens",
        "model_specific_special_tokens",
    ),
    *_keys("the added tokens by id, with their flags", "added_tokens_decoder"),
    *_keys("one chat template, or several by name", "chat_template"),
    *_keys("the longest text of an encoder", "model_max_length", "max_len"),
    *_keys("the end at which LLM.embed cuts a text", "truncation_side"),
    *_keys("special tokens in a text are plain text", "split_special_tokens"),
    *_keys(
        "spaces before punctuation are taken out of an answer",
        "clean_up_tokenization_spaces",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    ),
    *_keys("transformers makes the tokenizer, if tokenizer.json says something else", *SHAPING),
    *_keys(
        "transformers chooses the class by it, if transformers makes the tokenizer",
        "tokenizer_class",
    ),
    *_irrelevant("tokenizer.json says what is put around a text", "add_bos_token", "add_eos_token"),
    *_irrelevant(
        _NO_PADDING, "padding_side", "pad_token_type_id", "pad_to_multiple_of", "tokenizer_padding"
    ),
    *_irrelevant(
        "transformers cuts texts only if it is asked to, and to model_max_length",
        "max_length",
        "stride",
        "truncation_strategy",
        "tokenizer_truncation",
    ),
    *_irrelevant("the model is asked for what it needs", "model_input_names"),
    *_irrelevant("ids do not depend on it", "trim_offsets", "errors", "verbose"),
    *_irrelevant("no class of transformers applies it any more", "use_default_system_prompt"),
    *_irrelevant(_PARSING, "response_template", "response_schema", "chat_control_tokens"),
    *_irrelevant(
        _SAVED,
        "name_or_path",
        "is_local",
        "local_files_only",
        "processor_class",
        "backend",
        "files_loaded",
        "init_inputs",
        "_commit_hash",
        "gguf_file",
        "tokenizer_file",
        "vocab_file",
        "merges_file",
        "spm_file",
        "normalizer_file",
    ),
    *_irrelevant(
        _PAIRS,
        "cls_token_box",
        "sep_token_box",
        "pad_token_box",
        "pad_token_label",
        "only_label_first_subword",
        "tags_dict",
        "max_depth",
        "max_width",
        "pad_width",
        "entity_vocab",
        "max_entity_length",
        "max_mention_length",
        "entity_1_token",
        "entity_2_token",
        "entity_unk_token",
        "entity_pad_token",
        "entity_mask_token",
        "entity_mask2_token",
        "mask_token_sent",
        "question_encoder",
        "generator",
    ),
    *_irrelevant(
        _NO_PYTHON,
        "add_blank",
        "cell_trim_length",
        "do_basic_tokenize",
        "do_clean_text",
        "do_phonemize",
        "do_subword_tokenize",
        "do_word_tokenize",
        "drop_rows_to_fit",
        "emoji_file",
        "id2lang",
        "is_uroman",
        "jumanpp_kwargs",
        "lang2id",
        "langs",
        "max_column_id",
        "max_question_length",
        "max_row_id",
        "mecab_kwargs",
        "min_question_length",
        "never_split",
        "normalization",
        "normalize",
        "phonemize",
        "phonemizer_backend",
        "phonemizer_lang",
        "replace_word_delimiter_char",
        "src_vocab_file",
        "strip_column_names",
        "subword_tokenizer_type",
        "sudachi_kwargs",
        "target_lang",
        "tgt_vocab_file",
        "update_answer_coordinates",
        "word_pronunciation_file",
        "word_shape_file",
        "word_tokenizer_type",
    ),
    *_refused_keys(
        "transformers then reads one of these files by its version, and opgraft reads "
        "tokenizer.json",
        "fast_tokenizer_files",
        harmless=(None, [], ["tokenizer.json"]),
    ),
    *_refused_keys(
        "transformers itself fills it in, and no file has it",
        "post_processor",
        "tokenizer_object",
        "vocab",
        "merges",
        harmless=(None,),
    ),
)
"""``tokenizer_config.json`` beside ``tokenizer.json``, without which transformers reads all."""

_TEXT_ONLY = "opgraft embeds plain texts"
_OF_TASKS = (
    "sentence-transformers applies it to encode_query and encode_document, and not to encode"
)

_TRANSFORMER: tuple[SettingsKey, ...] = (
    *_keys("the longest text, in the place of the tokenizer's", "max_seq_length"),
    *_keys("texts are put in lower case", "do_lower_case"),
    *_keys("model_max_length in it is the longest text", "tokenizer_args", "processor_kwargs"),
    *_irrelevant("settings of opgraft say so", "unpad_inputs"),
    *_irrelevant(_OF_TASKS, "query_length", "document_length", "query_expansion"),
    *_irrelevant("the kernels and the dtype are set in opgraft", "backend"),
    *_refused_keys(
        "opgraft gives the model no arguments",
        "model_args",
        "model_kwargs",
        "config_args",
        "config_kwargs",
        harmless=(None, {}),
    ),
    *_refused_keys(
        "opgraft reads the tokenizer beside the model", "tokenizer_name_or_path", harmless=(None,)
    ),
    *_refused_keys(_TEXT_ONLY, "processing_kwargs", harmless=(None, {})),
)

SENTENCE_BERT_CONFIG: tuple[SettingsKey, ...] = (
    *_TRANSFORMER,
    *_refused_keys(_TEXT_ONLY, "transformer_task", harmless=(None, "feature-extraction")),
    *_refused_keys(
        _TEXT_ONLY,
        "modality_config",
        harmless=(None, {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}),
    ),
    *_refused_keys(_TEXT_ONLY, "module_output_name", harmless=(None, "token_embeddings")),
)
"""``sentence_bert_config.json``, and the files with this purpose in older versions."""

CROSS_ENCODER_TRANSFORMER: tuple[SettingsKey, ...] = (
    *_TRANSFORMER,
    *_refused_keys(_TEXT_ONLY, "transformer_task", harmless=(None, "sequence-classification")),
    *_refused_keys(
        _TEXT_ONLY,
        "modality_config",
        harmless=(None, {"text": {"method": "forward", "method_output_name": "logits"}}),
    ),
    *_refused_keys(_TEXT_ONLY, "module_output_name", harmless=(None, "scores")),
)
"""The same file of a cross-encoder."""

NORMALIZE_CONFIG: tuple[SettingsKey, ...] = (
    *_refused_keys(
        "opgraft normalizes the vector of a text and nothing else",
        "module_input_name",
        "module_output_name",
        harmless=(None, "sentence_embedding"),
    ),
)
"""``config.json`` in the folder of a module ``Normalize``."""

CONFIG_SENTENCE_TRANSFORMERS: tuple[SettingsKey, ...] = (
    *_keys("texts that are put before a text, by name", "prompts"),
    *_keys("the prompt that is put before a text", "default_prompt_name"),
    *_keys("the numbers of a vector that are returned", "truncate_dim"),
    *_refused_keys(
        "opgraft makes one vector of a text", "model_type", harmless=(None, "SentenceTransformer")
    ),
    *_irrelevant("comparing vectors is left to who asked for them", "similarity_fn_name"),
    *_irrelevant("it is of other libraries", "__version__", "requirements"),
)
"""``config_sentence_transformers.json``."""

CROSS_ENCODER_CONFIG: tuple[SettingsKey, ...] = (
    *_keys("the function from scores to probabilities", "activation_fn"),
    *_refused_keys("opgraft puts no prompt before a pair", "default_prompt_name", harmless=(None,)),
    *_refused_keys("the model has scores of labels", "model_type", harmless=(None, "CrossEncoder")),
    *_irrelevant("no prompt is used without a default", "prompts"),
    *_irrelevant("it is of other libraries", "__version__", "keep_in_fp32_modules"),
)
"""The same file of a cross-encoder."""

_ID = "the id of a special token"

GGUF_TOKENIZER: tuple[SettingsKey, ...] = (
    *_keys("the kind of vocabulary", "tokenizer.ggml.model"),
    *_keys("where a text is cut before pieces are merged", "tokenizer.ggml.pre"),
    *_keys(
        "the vocabulary",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.scores",
        "tokenizer.ggml.merges",
    ),
    *_keys(
        _ID,
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.unknown_token_id",
        "tokenizer.ggml.seperator_token_id",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.cls_token_id",
        "tokenizer.ggml.mask_token_id",
    ),
    *_keys(
        "a token that ends an answer",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
        "tokenizer.ggml.fim_pad_token_id",
        "tokenizer.ggml.fim_rep_token_id",
        "tokenizer.ggml.fim_sep_token_id",
    ),
    *_keys(
        "what is put around a text", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
    ),
    *_keys("whether a space is put before a text", "tokenizer.ggml.add_space_prefix"),
    *_keys("tokens that no answer has", "tokenizer.ggml.suppress_tokens"),
    *_keys("the chat templates", "tokenizer.chat_template", "tokenizer.chat_template.*"),
    *_irrelevant("the names of the templates, each of which has a key", "tokenizer.chat_templates"),
    *_irrelevant(
        "llama.cpp applies it to vocabularies of encoders, which are refused",
        "tokenizer.ggml.add_sep_token",
        "tokenizer.ggml.token_type_count",
        "tokenizer.ggml.normalizer.lowercase",
        "tokenizer.ggml.normalizer.strip_accents",
    ),
    *_irrelevant(
        "llama.cpp applies it to vocabularies of T5, which are refused",
        "tokenizer.ggml.remove_extra_whitespaces",
        "tokenizer.ggml.precompiled_charsmap",
    ),
    *_irrelevant(
        "it is for filling in the middle of a text, which a prompt spells out",
        "tokenizer.ggml.fim_pre_token_id",
        "tokenizer.ggml.fim_suf_token_id",
        "tokenizer.ggml.fim_mid_token_id",
        "tokenizer.ggml.prefix_token_id",
        "tokenizer.ggml.suffix_token_id",
        "tokenizer.ggml.middle_token_id",
    ),
    *_irrelevant(
        "llama.cpp does not read it either", "tokenizer.huggingface.json", "tokenizer.rwkv.world"
    ),
    *_refused_keys("which is not known", "tokenizer.ggml.*"),
)
"""GGUF metadata about text. Keys of the architecture are in ``opgraft.models.gguf_names``."""

_ADAPTER = (
    "a LoRA adapter",
    "Merge the adapter into its base model, as llama-export-lora of llama.cpp does, and load the "
    "result",
)
_PROJECTOR = (
    "the projector of a model that sees or hears",
    "Load the file of the language model that lies beside the projector",
)
_STATISTICS = ("statistics for quantizing", "Load the model that the statistics are about")
_CONTROL = ("control vectors", "Load the model that the vectors are made for")
GGUF_NO_MODELS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "adapter": _ADAPTER,
        "mmproj": _PROJECTOR,
        "clip": _PROJECTOR,
        "imatrix": _STATISTICS,
        "controlvector": _CONTROL,
    }
)
"""Contents and next step by ``general.type``, ``general.architecture`` or the start of keys."""

GGUF_GENERAL: tuple[SettingsKey, ...] = (
    *_keys("the family of the model", "general.architecture"),
    *_keys("where tensors may begin", "general.alignment"),
    *_keys(
        "Phi-3 is told by it, whose special tokens take in the spaces after them", "general.name"
    ),
    *_refused_keys("opgraft loads models", "general.type", harmless=("model",)),
    *_irrelevant(
        "each tensor has a type of its own", "general.quantization_version", "general.file_type"
    ),
    *_irrelevant("SamplingParams says how tokens are drawn", "general.sampling.*"),
    *_irrelevant("it describes the model for people", "general.*"),
    *_irrelevant("the names of the files say so", "split.*"),
    *_refused_keys("opgraft loads models", *(f"{name}.*" for name in GGUF_NO_MODELS)),
)
"""GGUF metadata about the file."""


def row_of(keys: Sequence[SettingsKey], name: str) -> SettingsKey | None:
    """Return the first row for a key; ``None`` if nobody reads the key."""
    for row in keys:
        # Each pattern has to be compiled, and most rows have plain names.
        if name == row.name or ("*" in row.name and fnmatchcase(name, row.name)):
            return row
    return None


def refusals(keys: Sequence[SettingsKey], settings: Mapping[str, Any]) -> list[str]:
    """Return a message for each setting that is refused, with name, value and reason."""
    problems = []
    for name, value in settings.items():
        row = row_of(keys, name)
        # Nobody reads an unknown key, so it changes nothing.
        if row is None or row.fate != "refused" or value in row.harmless:
            continue
        problems.append(f"{name:.80} is {value!r:.80}, and {row.why}")
    return problems
