"""A self-contained HTML page: its components, their data, scripts and styles in one file that needs no network.

    Component("attention/explorer", heading, data)    an element, the data for it as JSON, and explorer.js and
                                                      explorer.css of tools/attention, which show it in the element

The data hold text that others wrote, so they stand in the page as JSON in which no tag can begin. The page's policy
names the digest of its one script, and the browser runs no other. Scripts put text into the page as text, never as
HTML.
"""

import base64
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Component:
    """An element of a page. `assets` are files NAME.js and NAME.css in this folder, or in one below it.

    NAME.js calls `component(NAME, (element, data) => ...)` once; components of one kind share it. Kinds that a script
    makes itself are named in `also`.
    """

    assets: str
    heading: str
    data: object  # what JSON can hold
    also: Sequence[str] = ()


def format_page(title: str, components: Sequence[Component]) -> str:
    """The page with these components, below one another."""
    # The styles and scripts of the page and of each kind of component, once.
    kinds: dict[str, None] = {"page": None}
    for component in components:
        kinds.update(dict.fromkeys((component.assets, *component.also)))
    style = "\n".join(_read(f"{kind}.css") for kind in kinds)
    script = "\n".join(_read(f"{kind}.js") for kind in kinds) + "\nfillComponents();\n"

    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}"
    sections = "".join(_format_component(component) for component in components)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{sections}<script>{script}</script>\n</body>\n</html>\n"
    )


def _format_component(component: Component) -> str:
    """The section of a component: the element that its script fills, and its data."""
    return (
        f'<section>\n<h2>{html.escape(component.heading)}</h2>\n<div data-component="{component.assets}"></div>\n'
        f'<script type="application/json">{as_script_data(component.data)}</script>\n</section>\n'
    )


def as_script_data(data: object) -> str:
    """JSON that may stand in a script element: `</script>` and `<!--` cannot occur in it."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    """What a content security policy names a script or a style by."""
    digest = sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
