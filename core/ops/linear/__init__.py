"""Linear layers, whole or in parts, merged or transposed."""

from opgraft.ops.linear.merged import *
from opgraft.ops.linear.modules import *
from opgraft.ops.linear.parallel import *
from opgraft.ops.linear.transposed import *
