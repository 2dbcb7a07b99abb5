"""Train dense retrievers under a memory budget: InfoNCE with a dual bank of past queries and passages."""

from contaccum.bank import DualBank
from contaccum.criterion import DualBankInfoNCE
from contaccum.infonce import dual_bank_infonce, naive_dual_bank_infonce

__version__ = "0.1.0"
__all__ = ["DualBank", "DualBankInfoNCE", "dual_bank_infonce", "naive_dual_bank_infonce"]
