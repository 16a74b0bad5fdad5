"""Grafts a sentence encoder of transformers, and prints what was replaced by what."""

import opgraft
from opgraft.models import find_checkpoint
from transformers import AutoModel

encoder = AutoModel.from_pretrained(find_checkpoint("minilm"))
print(opgraft.graft(encoder))
