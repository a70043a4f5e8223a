"""Where somebody is: geographic coordinates."""

import re

from eagle3.prompts.privacy.recogniser import Pattern, words


class DegreeCoordinates(Pattern):
    """Latitude and longitude in degrees, minutes and seconds, with their hemispheres."""

    entity = "COORDINATES"
    gates = ("°", "º", "deg")
    angle = (
        r"\d{1,3}(?:\.\d{1,10})? ?(?:°|º|deg) ?(?:\d{1,2}(?:\.\d{1,6})? ?['\u2032\u2019m] ?"
        r"(?:\d{1,2}(?:[.,]\d{1,6})? ?(?:[\"\u2033\u201d]|''|\u2032\u2032) ?)?)?"
    )
    pattern = re.compile(rf"{angle}[NS][,;/]? ?{angle}[EWO]|[NS] ?{angle}[,;/]? ?[EWO] ?{angle}")


class Coordinates(Pattern):
    """Decimal latitude and longitude: with hemispheres, with context, or both of 5 decimals (1 m) and more."""

    entity = "COORDINATES"
    pattern = re.compile(
        r"(?P<lat>[-+\d]\d{0,2}(?:\.\d{3,15}|,\d{4,12}))°? ?(?P<north>[NS]\b)?[\s,;:/|&\"'(){}]{1,8}"
        r"(?:l(?:o?ng?|ongitude?|ongitudine)[\s:=\"']{1,5})?"
        r"(?P<lon>[-+\d]\d{0,3}(?:\.\d{3,15}|,\d{4,12}))(?!\d|[\s,]{1,3}[-+]?\d{1,8}\.\d{3})(?:°? ?[EWO]\b)?"
    )
    after_float = re.compile(r"\d\.\d{3,15}[\s,]{1,3}\Z")  # then these two are part of a list of numbers
    context = words(
        r"lat(?:itude?|itudine)?", r"l(?:o?ng?|ongitude?|ongitudine)", r"latlo?ng", "gps", r"geo(?:location)?",
        r"coord\w{0,11}",
        r"locat\w{2,4}", "maps", r"ubicaci[oó]n", "standort", r"koordinaten", r"co[öo]rdina\w{2,4}",
        r"locali[sz]\w{2,6}",
        "posizione", r"meet\w{0,3} (?:me )?at",
    )  # fmt: skip

    def valid(self, match: re.Match[str]) -> bool:
        latitude, longitude = (abs(float(match[name].replace(",", "."))) for name in ("lat", "lon"))
        before = match.string[max(0, match.start() - 20) : match.start()]
        return (
            latitude <= 90 and longitude <= 180 and max(latitude, longitude) > 1 and not self.after_float.search(before)
        )

    def needs_context(self, match: re.Match[str]) -> bool:
        if match["north"]:
            return False
        parts = [match[name].lstrip("+-").partition(".") for name in ("lat", "lon")]
        precise = all(5 <= len(decimals) <= 8 for _, _, decimals in parts)
        return not (precise and any(len(whole) > 1 for whole, _, _ in parts))
