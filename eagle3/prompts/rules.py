"""All rules about prompts, built from the groups of conf/prompts: checks of a row, duplicates, traffic mix."""

from collections import Counter
from typing import Any

from eagle3.prompts.filters import LanguageCheck, LengthCheck
from eagle3.prompts.licenses.rules import LicenseCheck, LicenseRules
from eagle3.prompts.overlap.duplicates import Signer, known_files
from eagle3.prompts.overlap.leaks import LeakCheck, read_benchmarks
from eagle3.prompts.privacy import Privacy
from eagle3.prompts.reading.prompt import Check, Prompt
from eagle3.prompts.reading.rendered import TargetMarkers, TargetMarkersCheck
from eagle3.prompts.reading.rows import read_prompts
from eagle3.prompts.reading.sources import Source, file_state, source_at
from eagle3.prompts.traffic.mix import TrafficMix
from eagle3.settings.parts import plain
from eagle3.settings.prompts import PromptSettings

# Groups of conf/prompts that decide about a row.
GROUPS = ("licenses", "length", "language", "privacy", "decontamination", "duplicates", "traffic")


class Rules:
    """privacy: the check built from `settings.privacy`; markers: None without a target."""

    def __init__(self, settings: PromptSettings, *, privacy: Privacy, markers: TargetMarkers | None = None):
        self.settings = settings
        self.privacy = privacy
        self.licenses = LicenseRules(settings.licenses)
        self.benchmarks = read_benchmarks(settings.decontamination.benchmarks)
        self.duplicates = settings.duplicates
        self.signer = Signer(self.duplicates)
        self.known = known_files(self.duplicates.known)
        self.traffic = TrafficMix(**vars(settings.traffic)) if settings.traffic else None
        self.markers = markers
        self._common: list[Check] = [TargetMarkersCheck(markers)] if markers else []
        self._common += [LanguageCheck(**vars(settings.language)), privacy]
        if self.benchmarks:
            self._common.append(LeakCheck(self.benchmarks, settings.decontamination.dropped_words))

    def checks(self, source: Source) -> list[Check]:
        """Return the checks for a row of the source, in order."""
        checks: list[Check] = [LengthCheck(**vars(self.settings.length)), *self._common]
        if source.written_by:  # whoever trains on the target's answers has accepted its licence
            return checks
        return [LicenseCheck(self.licenses, source.terms), *checks]

    def inputs(self) -> dict[str, Any]:
        """Return everything that the result depends on, except the sources: settings, and the state of their files."""
        files = [benchmark.state for benchmark in self.benchmarks]
        files.append([file_state(str(file)) for file in self.privacy.files()])
        files.append([file_state(file) for file in self.known.values()])
        if self.traffic is not None:
            files.append(self._sample_source(self.traffic).fingerprint())
        markers = {"markers": self.markers.plain()} if self.markers else {}
        return {**{group: plain(getattr(self.settings, group)) for group in GROUPS}, **markers, "files": files}

    def sample_cells(self, mix: TrafficMix) -> Counter[int]:
        """Count the production prompts of the sample by cell."""
        rows = (found for _, found in read_prompts(self._sample_source(mix)))
        return Counter(mix.cell(found) for found in rows if isinstance(found, Prompt))

    def _sample_source(self, mix: TrafficMix) -> Source:
        # Conversations with tools are part of the traffic, also where prompts.tools=refuse keeps them from the pool.
        return source_at("prompts.traffic.sample", {"path": mix.sample, "tools": "keep"})
