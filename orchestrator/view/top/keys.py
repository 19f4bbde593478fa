"""The keys of `top`, and the page that lists them; as in nvitop, k9s and btop where they agree."""

from __future__ import annotations

from typing import Final

from textual.binding import Binding, BindingType

HELP: Final = """
 q ctrl-c      leave                         ? h  this help; esc goes back
 up down j k   move, as the mouse does; g G first and last; pgup pgdn a page
 enter         the slot under the cursor  a e d n u  alerts events cards nodes runs
 /             filter: state:lost temp>75 cap>3GiB !node:pc1 /regex/ word
 < > , .       sort by the column before or after; o by its name
 r 0           turn the order; worst first
 c             choose columns; space takes one away or back
 space         mark the slot for a command; a new filter clears the marks
 P U D R C W   pause, unpause, drain, reinstate, cap, save now: the marked slots,
               or the one under the cursor; asks first
 m             how far back the courses of a slot go: 2 m, 10 m, 1 h, all
 t             replay; left right 1 s, [ ] 1 min, home end, p plays
 s             save this screen as text in the present folder
"""

_KEYS: Final = (
    ("q", "end"),
    ("ctrl+c", "quit"),
    ("question_mark,h", "page('help')"),
    ("a", "page('alerts')"),
    ("e", "page('events')"),
    ("d", "page('cards')"),
    ("enter", "page('slot')"),
    ("escape", "leave"),
    ("down,j", "move(1)"),
    ("up,k", "move(-1)"),
    ("pagedown", "move_pages(1)"),
    ("pageup", "move_pages(-1)"),
    ("g", "move(-1000000)"),
    ("G", "move(1000000)"),
    ("slash", "ask('filter')"),
    ("greater_than_sign,full_stop", "sort(1)"),
    ("less_than_sign,comma", "sort(-1)"),
    ("r", "reverse"),
    ("0", "worst"),
    ("o", "ask('sort')"),
    ("c", "page('columns')"),
    ("n", "page('nodes')"),
    ("u", "page('runs')"),
    ("space", "pick"),
    ("P", "command('pause')"),
    ("U", "command('unpause')"),
    ("D", "command('drain')"),
    ("R", "command('reinstate')"),
    ("C", "command('cap')"),
    ("W", "command('save')"),
    ("y", "yes"),
    ("m", "range"),
    ("t", "replay"),
    ("left", "seek(-1)"),
    ("right", "seek(1)"),
    ("left_square_bracket", "seek(-60)"),
    ("right_square_bracket", "seek(60)"),
    ("home", "seek(-1000000000)"),
    ("end", "seek(1000000000)"),
    ("p", "play"),
    ("s", "save"),
)

#: Priority: a key acts before the one after it is handed on, so that what is typed after `/` goes
#: into the filter.
BINDINGS: Final[list[BindingType]] = [Binding(key, action, priority=True) for key, action in _KEYS]
