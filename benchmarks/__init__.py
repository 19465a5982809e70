"""What chatflow costs, beside hand-written sqlite3 and beside other packages, as ratios of one run: `README.md`.

Each system runs in a process of its own, with its own interpreter, so that packages that can't be installed together
are measured together. What those processes run (`worker`, `systems`, `themes`) imports nothing but the standard
library, attrs and the system itself.
"""
