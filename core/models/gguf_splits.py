"""The byte-level vocabularies of GGUF files by ``tokenizer.ggml.pre``: their cuts of a text.

The names are those of llama.cpp (``src/llama-vocab.cpp``). If llama.cpp approximates an expression
of the model's own ``tokenizer.json``, the model's expression stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class VocabularyCuts:
    """The cuts and the flags of a byte-level vocabulary.

    Attributes:
        splits: expressions, each applied to the pieces of the one before. Each match is a piece,
            and so is the text between two matches.
        whole_words: a piece stays whole if it is a token, even if no merges lead to it.
        begins: a text begins with the token of ``bos_token_id``, unless ``add_bos_token`` is false.
        lstrip: tokens that take in the spaces before them.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False
    lstrip: tuple[str, ...] = ()


# The library reads Oniguruma's syntax, which is that of tokenizer.json: \p{L} is a letter, \p{N} a
# digit, \p{M} a mark, and && the intersection of two classes.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# The lookahead leaves the last of several spaces to the word behind.
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(end: str = "", without: str = "") -> str:
    """Return an expression for words, cut before each capital letter.

    Args:
        end: the expression of the end of a word.
        without: letters to leave out of both classes.
    """
    upper = f"[{_UPPER}{without}]"
    lower = f"[{_LOWER}{without}]"
    # Both branches begin with at most one sign, such as a space.
    before = r"[^\r\n\p{L}\p{N}]?"
    small_last = before + upper + "*" + lower + "+"
    capital_first = before + upper + "+" + lower + "*"
    return small_last + end + "|" + capital_first + end


_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_cased()}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_GPT4O = rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_YOUTU = rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_KIMI_WORD = _cased(_CONTRACTIONS + "?", r"&&[^\p{Han}]")
_KIMI = rf"\p{{Han}}+|{_KIMI_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
# Chinese characters, and the two Japanese syllabaries.
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_WORD = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    _CJK,
    rf"{_DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_SPARK = (
    r"\p{N}{1,3}",
    _CJK,
    rf"{_DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_OLDER_CASED = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7ff"
    "\uab30-\uab68\U00010570-\U000105bb\U00010d50-\U00010d85\U00016e40-\U00016e7f"
    "\U0001d400-\U0001d7cb\U0001df00-\U0001df2a]]"
)
"""Letters with an upper and a lower case, in the scripts that the file of DeepSeek LLM lists."""

_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_OLDER_CASED}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Groups of three digits, counted from the right as in a written number.
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"
_TRINITY = (
    r"\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{3}|\p{N}{1,2}",
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+",
    _DEEPSEEK3[-1],
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_JAIS_SPACES = (
    r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)

_PLAIN = VocabularyCuts((_GPT2,))
# Each digit is a piece, so that all numbers have the same tokens.
_DIGITS = VocabularyCuts((r"\p{N}", _GPT2))
_OF_LLAMA3 = VocabularyCuts((_LLAMA3,), whole_words=True, begins=True)
_LIKE_LLAMA3 = VocabularyCuts((_LLAMA3,))
_OF_QWEN2 = VocabularyCuts((_QWEN2,))
_OF_GPT4O = VocabularyCuts((_GPT4O,))
_OF_DEEPSEEK3 = VocabularyCuts(_DEEPSEEK3)
_OF_BLOOM = VocabularyCuts((_BLOOM,))
_WITH_THREES = VocabularyCuts((_THREES, _GPT4O))
_OF_JINA = VocabularyCuts((_GPT2,), lstrip=("<mask>",))
_OF_LING = VocabularyCuts(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

VOCABULARIES: Mapping[str, VocabularyCuts] = MappingProxyType(
    {
        "default": VocabularyCuts((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        **dict.fromkeys(
            (
                "llama3",
                "llama-v3",
                "llama-bpe",
                "falcon3",
                "falcon-h1",
                "pixtral",
                "midm-2.0",
                "lfm2",
                "jina-v5-nano",
            ),
            _OF_LLAMA3,
        ),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LIKE_LLAMA3),
        **dict.fromkeys(("glm4", "glm5"), VocabularyCuts((_LLAMA3,), whole_words=True)),
        "jais-2": VocabularyCuts(
            (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_JAIS_SPACES}",),
        ),
        "minicpm5": VocabularyCuts(
            (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"),
            whole_words=True,
        ),
        "deepseek-llm": VocabularyCuts(_DEEPSEEK_LLM),
        "deepseek-coder": VocabularyCuts(_DEEPSEEK_CODER),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _OF_DEEPSEEK3),
        "spark2_5": VocabularyCuts(_SPARK),
        "youtu": VocabularyCuts((_YOUTU_SCRIPTS, _YOUTU), whole_words=True),
        "falcon": VocabularyCuts((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
        **dict.fromkeys(
            (
                "gpt-2",
                "phi-2",
                "jina-es",
                "jina-de",
                "gigachat",
                "a.x-4.0",
                "mellum",
                "jina-v1-en",
                "roberta-bpe",
                "mpt",
                "olmo",
                "jais",
                "trillion",
                "granite-docling",
                "exaone4",
            ),
            _PLAIN,
        ),
        **dict.fromkeys(("jina-v2-es", "jina-v2-de", "jina-v2-code"), _OF_JINA),
        "modern-bert": VocabularyCuts((_GPT2,), lstrip=("[MASK]",)),
        **dict.fromkeys(
            (
                "starcoder",
                "refact",
                "command-r",
                "smollm",
                "codeshell",
                "exaone",
                "minerva-7b",
                "mellum2",
            ),
            _DIGITS,
        ),
        **dict.fromkeys(
            (
                "qwen2",
                "deepseek-r1-qwen",
                "kormo",
                "f2llmv2",
                "stablelm2",
                "megrez",
                "hunyuan",
                "solar-open",
                "grok-2",
            ),
            _OF_QWEN2,
        ),
        "qwen35": VocabularyCuts((_QWEN35,)),
        **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _OF_BLOOM),
        "viking": VocabularyCuts((_BLOOM, r"\p{N}")),
        "tekken": VocabularyCuts((_TEKKEN,), whole_words=True, begins=True),
        "chameleon": VocabularyCuts(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            begins=True,
        ),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _OF_GPT4O),
        "granite-embed-multi-97m": VocabularyCuts((_GPT4O,), whole_words=True),
        **dict.fromkeys(("tiny_aya", "cohere2moe"), _WITH_THREES),
        "kimi-k2": VocabularyCuts((_KIMI,)),
        "superbpe": VocabularyCuts((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
        **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _OF_LING),
        "seed-coder": VocabularyCuts(
            (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
        ),
        "ufakzeka": VocabularyCuts((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",)),
        "afmoe": VocabularyCuts(_TRINITY),
        "laguna": VocabularyCuts((r"[^\n]+|[\n]+", _QWEN2)),
        "exaone-moe": VocabularyCuts(
            (
                rf"{_CONTRACTIONS}"
                r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    }
)
"""Cuts by name. llama.cpp takes "default" for a file without a name."""

_CHARACTERS = (
    "it merges characters instead of bytes, for models that are not read from GGUF files here"
)

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "gemma4": _CHARACTERS,
        "granite-embed-multi-311m": _CHARACTERS,
        "sarvam-moe": _CHARACTERS,
        "whitespace": "it takes words apart by a trie, for an encoder that is not read here",
    }
)
"""Names of llama.cpp that are not read, each with the reason."""
