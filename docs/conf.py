"""How Sphinx builds the pages that ``tools/build_site.py`` assembles."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import ratp

project = "ratp"
version = release = ratp.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="equation">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Renders equations as MathML, which browsers show without scripts or downloads."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
