"""Generated questions about generated contexts: seeded, of any length, in English and Chinese. No corpus is copied."""

from collections.abc import Mapping

from eval.tasks.aggregation import aggregation
from eval.tasks.copying import copying
from eval.tasks.documents import documents
from eval.tasks.facts import distractors, several, single, values
from eval.tasks.hops import hops
from eval.tasks.task import Task
from eval.tasks.variables import variables

TASKS: Mapping[str, Task] = {
    "facts-single": single,
    "facts-several": several,
    "facts-values": values,
    "facts-distractors": distractors,
    "hops": hops,
    "copying": copying,
    "variables": variables,
    "aggregation": aggregation,
    "documents": documents,
}
