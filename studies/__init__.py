"""Studies: what the losses do for trained models, one file a question.

python -m studies.hem_digits --seeds 5      # results, table and picture in studies/results
python -m studies.hem_digits --quick        # scikit-learn's bundled digits, in seconds
"""
