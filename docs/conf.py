"""How Sphinx builds the pages that ``tools/build_site.py`` assembles."""

from importlib.resources import files

import ratp

project = "ratp"
version = release = ratp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
highlight_language = "text"

myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_allow_space = False

autodoc_member_order = "bysource"
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "ratp"
# One file of MathJax, which needs neither fonts nor a network.
html_static_path = ["static", str(files("sphinx-mathjax-offline") / "static" / "mathjax" / "tex-svg.js")]
mathjax_path = "tex-svg.js"
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
