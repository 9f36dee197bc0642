"""Studies: what the losses do for trained models, one file a question.

python -m studies.hem_digits --seeds 5      # results, table and picture in studies/results
python -m studies.hem_digits --quick        # scikit-learn's bundled digits, in seconds
"""

import sys
from pathlib import Path

# `python -m` puts the folder above on the path, where transformers would take the folder `kernels` for a package of that name.
_above = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _above]
