from .base import Encoder as Encoder
from .base import TextEncoder as TextEncoder
from .base import TokenEncoder as TokenEncoder
from .bert import BertEncoder as BertEncoder
from .hashed_words import HashingEncoder as HashingEncoder
from .language_model import LMEncoder as LMEncoder
from .load import load_encoder as load_encoder
from .token_bag import TokenBagEncoder as TokenBagEncoder
