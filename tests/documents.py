"""Documents for tests, made in code: a long report with planted facts and personal data, and broken files."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from textwrap import TextWrapper

from fpdf import FPDF
from PIL import Image, ImageDraw
from pypdf import PdfReader, PdfWriter

PAGE_CHARS = 2200
SENTENCES_PER_PARAGRAPH = 5

WRAPPER = TextWrapper(width=100, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class Planted:
    """A piece of personal data. `kind` is Presidio's name of the entity, `page` counts from 1."""

    kind: str
    value: str
    page: int


@dataclass(frozen=True)
class Fact:
    """A question that one sentence of one page answers; `answer` is spelled as in that sentence."""

    question: str
    answer: str
    page: int


@dataclass(frozen=True)
class Report:
    """A document as the texts of its pages, and what was planted in it."""

    pages: tuple[str, ...]
    facts: tuple[Fact, ...]
    planted: tuple[Planted, ...]


# Each: the sentence, the question, the answer.
FACTS = (
    (
        "The spare key for the boiler room of the Halden depot is kept in locker 47.",
        "Where is the spare key for the boiler room of the Halden depot kept?",
        "locker 47",
    ),
    (
        "The drive belt of the Corvan press must be replaced every 18 months.",
        "How often must the drive belt of the Corvan press be replaced?",
        "18 months",
    ),
    (
        "The warning lamp on the cooling tower is painted turquoise.",
        "What colour is the warning lamp on the cooling tower painted?",
        "turquoise",
    ),
    (
        "The annual budget for lubricants was 312,000 euros.",
        "What was the annual budget for lubricants?",
        "312,000 euros",
    ),
    (
        "The safety valve of the blue compressor opens at 14 bar.",
        "At what pressure does the safety valve of the blue compressor open?",
        "14 bar",
    ),
    (
        "The emergency assembly point of the northern warehouse is beside the flagpole.",
        "Where is the emergency assembly point of the northern warehouse?",
        "beside the flagpole",
    ),
    (
        "The winter inspection of the harbour crane takes place in November.",
        "In which month does the winter inspection of the harbour crane take place?",
        "November",
    ),
    (
        "The test run of the backup generator lasts 25 minutes.",
        "How long does the test run of the backup generator last?",
        "25 minutes",
    ),
    (
        "The old wiring diagrams are stored in the lighthouse.",
        "Where are the old wiring diagrams stored?",
        "lighthouse",
    ),
    (
        "The tightening torque of the flywheel bolts is 85 newton metres.",
        "What is the tightening torque of the flywheel bolts?",
        "85 newton metres",
    ),
    (
        "The forklift trucks of the eastern yard run on hydrogen.",
        "What do the forklift trucks of the eastern yard run on?",
        "hydrogen",
    ),
    (
        "The training course for crane drivers takes nine days.",
        "How many days does the training course for crane drivers take?",
        "nine days",
    ),
)

PEOPLE = (
    "Margaret Ellison",
    "Thomas James Whitfield",
    "Robert Callahan",
    "Anna Maria Lindgren",
    "David Thornton",
    "Patricia Henderson",
    "Michael Brennan",
    "Laura Jane Bennett",
    "William Fletcher",
    "Jennifer Morrison",
)

# How many of each kind a report has, and the sentences that they stand in, used in turn.
PLANTED: dict[str, tuple[int, tuple[str, ...]]] = {
    "PERSON": (
        7,
        (
            "Please contact {} at the service desk before the work begins.",
            "The final inspection was signed by {} on behalf of the company.",
            "Questions about this section are answered by {}, who leads the workshop.",
        ),
    ),
    "EMAIL_ADDRESS": (
        4,
        (
            "Reports of damage should be sent by email to {} within one working day.",
            "The current drawings can be requested from {} at any time.",
        ),
    ),
    "PHONE_NUMBER": (
        3,
        (
            "Outside office hours, call the phone number {} and describe the fault.",
            "The telephone number of the control room is {} on all days.",
        ),
    ),
    "CREDIT_CARD": (
        3,
        (
            "The spare parts were paid for with the credit card {} of the purchasing department.",
            "The hotel near the site was booked with credit card {} in advance.",
        ),
    ),
    "IBAN_CODE": (
        2,
        ("Deposits for rented tools are returned to the bank account with the IBAN {} after the return.",),
    ),
    "US_SSN": (
        3,
        (
            "The payroll form of the temporary fitter shows the social security number {} in the first field.",
            "For the site badge, the social security number {} was recorded by mistake.",
        ),
    ),
    "IP_ADDRESS": (
        2,
        ("The controller of the pumping station answers at the IP address {} inside the plant network.",),
    ),
}

TOPICS = (
    "Condition of the extraction fans",
    "Renewal of the sealing programme",
    "Energy use of the workshops",
    "Care of the surface coatings",
    "Storage of spare parts",
    "Results of the vibration survey",
    "Planning of the summer shutdown",
    "Calibration of the measuring devices",
    "Handling of cutting fluids",
    "Repairs to the loading ramps",
    "Quality of the supplied castings",
    "Noise in the assembly halls",
    "Lessons from the audits",
    "Wear of the milling tools",
    "Cleaning of the drainage channels",
)

SLOTS: dict[str, tuple[str, ...]] = {
    "machine": (
        "the milling line",
        "the extraction fan",
        "the band saw",
        "the washing station",
        "the drying oven",
        "the packing line",
        "the grinding machine",
        "the transfer pump",
        "the dust collector",
        "the turning centre",
        "the lifting table",
        "the labelling unit",
        "the mixing vessel",
        "the sorting drum",
        "the welding cell",
        "the roller track",
    ),
    "part": (
        "the shaft seal",
        "the inlet screen",
        "the guide rail",
        "the coupling",
        "the front bearing",
        "the limit switch",
        "the feed roller",
        "the filter basket",
        "the clamping ring",
        "the terminal box",
        "the pressure gauge",
        "the spindle cover",
        "the support bracket",
        "the return spring",
        "the wiper blade",
        "the sliding door",
    ),
    "team": (
        "the maintenance crew",
        "the night shift",
        "the early shift",
        "the planning office",
        "the tool room",
        "the quality department",
        "the site management",
        "the electrical workshop",
        "the external inspector",
        "the supplier",
    ),
    "time": (
        "in the first quarter",
        "towards the end of the year",
        "after the summer break",
        "over the past two seasons",
        "during the regular shutdown",
        "in the weeks before the audit",
        "since the last report",
        "at the beginning of the reporting period",
        "within a single shift",
        "in the course of the trial phase",
    ),
    "cause": (
        "fine dust had settled in the housing",
        "the alignment had drifted by a small amount",
        "the previous grease had become too stiff",
        "moisture had entered through a worn gasket",
        "the load was higher than in earlier years",
        "the cable route passed too close to a hot surface",
        "the mounting screws had worked loose",
        "the delivered material varied in thickness",
        "the settings had been copied from an older model",
        "the ventilation of the hall was not sufficient",
    ),
    "effect": (
        "the number of unplanned stops fell noticeably",
        "the surface quality improved from batch to batch",
        "the temperature stayed well within the permitted range",
        "the noise level dropped to a comfortable value",
        "the consumption of compressed air went down",
        "the changeover now needs far fewer steps",
        "no further complaints were received",
        "the reject rate returned to its usual level",
        "the remaining service life could be extended",
        "the operators gained time for preventive work",
    ),
    "task": (
        "clean the contact surfaces with a dry cloth",
        "check the tension with the gauge supplied",
        "note the reading in the machine log",
        "disconnect the power supply and secure it against switching on",
        "remove the side panel and inspect the hoses",
        "apply a thin film of grease to the sliding faces",
        "compare the measured value with the table in the appendix",
        "listen for unusual sounds while the drive runs down",
        "turn the hand wheel until the marks line up",
        "tighten the screws crosswise and in two passes",
    ),
    "plan": (
        "replace the remaining units step by step",
        "extend the programme to the smaller sites",
        "shorten the interval between two inspections",
        "keep a larger stock of wearing parts",
        "repeat the measurement under full load",
        "repaint the floor markings",
        "move the work to the quieter months",
        "ask for a second offer",
        "review the agreement with the supplier",
        "publish the results on the notice board",
    ),
    "count": ("two", "three", "four", "five", "six", "seven", "eight", "ten", "a dozen", "fifteen"),
}

TEMPLATES = (
    "{time}, {team} examined {machine} and found that {cause}.",
    "{team} replaced {part} of {machine}, and {effect}.",
    "because {cause}, {part} of {machine} had to be adjusted {time}.",
    "before starting {machine}, {task}.",
    "{count} faults were reported on {machine} {time}; in most cases {cause}.",
    "it was decided to {plan}, since {cause}.",
    "after {team} had reworked {part}, {effect}.",
    "whenever {machine} is stopped for longer than a weekend, {task}.",
    "{team} intends to {plan} once {machine} has been returned to service.",
    "to protect {part}, {task} and then {task2}.",
    "compared with {machine2}, {machine} needed {count} hours less attention {time}.",
    "{part} and {part2} were inspected together, which showed that {cause}.",
    "as a result of the measures taken {time}, {effect}.",
    "if {part} shows signs of wear, {task} before {machine} is used again.",
    "{team} recorded {count} stops of {machine}, but {effect} after the repair.",
    "a comparison of {machine} with {machine2} suggests that {cause}.",
    "there is no need to {plan} as long as {part} passes the visual check.",
    "the costs for {machine} remained stable {time}, although {cause}.",
    "on the advice of {team}, the site will {plan} and {plan2}.",
    "{effect} when {part} of {machine} was exchanged for the newer version.",
)


def report(pages: int = 40, seed: int = 0) -> Report:
    """A maintenance report of an invented company, the same for the same arguments.

    Facts are spread from the first page to the last, personal data over all pages.
    """
    rng = random.Random(seed)
    special: list[list[str]] = [[] for _ in range(pages)]
    facts = []
    for index, (sentence, question, answer) in enumerate(FACTS):
        page = 1 + index * (pages - 1) // (len(FACTS) - 1)
        special[page - 1].append(sentence)
        facts.append(Fact(question, answer, page))
    planted = []
    personal = _personal_data(rng)
    for index, (kind, value, sentence) in enumerate(personal):
        page = 1 + index * pages // len(personal)
        special[page - 1].append(sentence)
        planted.append(Planted(kind, value, page))
    texts = tuple(_page(rng, number, sentences) for number, sentences in enumerate(special, start=1))
    return Report(texts, tuple(facts), tuple(planted))


def as_pdf(pages: Sequence[str]) -> bytes:
    """A PDF with one page for each text, which must be Latin-1. What is too long runs off the page."""
    pdf = _new_pdf()
    for text in pages:
        pdf.add_page()
        lines = [line for paragraph in text.split("\n") for line in WRAPPER.wrap(paragraph) or [""]]
        for row, line in enumerate(lines):
            pdf.text(15, 20 + 5 * row, line)
    return bytes(pdf.output())


def as_text(pages: Sequence[str]) -> bytes:
    """Plain text with a form feed between pages."""
    return "\f".join(pages).encode()


def as_markdown(pages: Sequence[str]) -> bytes:
    """Markdown with a heading for each page."""
    return "\n\n".join(f"## Page {number}\n\n{text}" for number, text in enumerate(pages, start=1)).encode()


def scanned_pdf(pages: int = 3) -> bytes:
    """A PDF whose pages are pictures of text."""
    pdf = _new_pdf()
    for number in range(1, pages + 1):
        image = Image.new("L", (620, 877), color=255)
        ImageDraw.Draw(image).text((60, 60), f"Page {number} of a scanned letter.", fill=0)
        pdf.add_page()
        pdf.image(image, x=0, y=0, w=pdf.w, h=pdf.h)
    return bytes(pdf.output())


def encrypted_pdf(user_password: str) -> bytes:
    """A PDF that opens only with the password (AES-256)."""
    return _encrypt(user_password, user_password)


def owner_locked_pdf() -> bytes:
    """A PDF that anyone can open and only its owner may change (AES-256)."""
    return _encrypt("", "owner")


def truncated_pdf() -> bytes:
    """A PDF of which only the first half arrived."""
    whole = as_pdf(("The second half of this file is missing.",) * 4)
    return whole[: len(whole) // 2]


def pdf_with_ring_in_prev() -> bytes:
    """A PDF whose cross-reference table names itself as its predecessor."""
    content = b"BT /F1 12 Tf 72 720 Td (The table of this file points to itself.) Tj ET"
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<</Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources <</Font <</F1 5 0 R>>>>>>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    data = bytearray(b"%PDF-1.4\n")
    table = bytearray(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
    for number, body in enumerate(objects, start=1):
        table += b"%010d 00000 n \n" % len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(data)
    data += table
    data += b"trailer\n<< /Size %d /Root 1 0 R /Prev %d >>\n" % (len(objects) + 1, start)
    data += b"startxref\n%d\n%%%%EOF\n" % start
    return bytes(data)


def not_a_pdf() -> bytes:
    """A PNG picture."""
    buffer = BytesIO()
    Image.new("RGB", (8, 8), color=(200, 30, 30)).save(buffer, format="PNG")
    return buffer.getvalue()


def empty() -> bytes:
    """No bytes at all."""
    return b""


def _page(rng: random.Random, number: int, special: Sequence[str]) -> str:
    title = f"{number}. {TOPICS[(number - 1) % len(TOPICS)]}"
    sentences: list[str] = []
    room = PAGE_CHARS - sum(map(len, special))
    while sum(map(len, sentences)) < room:
        sentences.append(_sentence(rng))
    for sentence in special:
        sentences.insert(rng.randint(0, len(sentences)), sentence)
    paragraphs = [
        " ".join(sentences[start : start + SENTENCES_PER_PARAGRAPH])
        for start in range(0, len(sentences), SENTENCES_PER_PARAGRAPH)
    ]
    return "\n\n".join([title, *paragraphs])


def _sentence(rng: random.Random) -> str:
    words: dict[str, str] = {}
    for slot, choices in SLOTS.items():
        words[slot], words[f"{slot}2"] = rng.sample(choices, 2)
    text = rng.choice(TEMPLATES).format_map(words)
    return text[0].upper() + text[1:]


def _personal_data(rng: random.Random) -> list[tuple[str, str, str]]:
    """Kinds, values and the sentences around them, in random order."""
    people = rng.sample(PEOPLE, PLANTED["PERSON"][0])
    rows = []
    for kind, (count, sentences) in PLANTED.items():
        for index in range(count):
            value = _value(rng, kind, people[index])
            rows.append((kind, value, sentences[index % len(sentences)].format(value)))
    rng.shuffle(rows)
    return rows


def _value(rng: random.Random, kind: str, person: str) -> str:
    match kind:
        case "PERSON":
            return person
        case "EMAIL_ADDRESS":
            return f"{person.lower().replace(' ', '.')}@example.com"
        case "PHONE_NUMBER":
            return f"{rng.choice((212, 312, 415, 617))}-555-01{_digits(rng, 2)}"
        case "CREDIT_CARD":
            return _credit_card(rng)
        case "IBAN_CODE":
            return _iban(_digits(rng, 18))
        case "US_SSN":
            return f"{rng.randint(500, 599)}-{rng.randint(10, 99)}-{rng.randint(1000, 9999)}"
        case "IP_ADDRESS":
            return f"203.0.113.{rng.randint(1, 254)}"
        case _:
            raise ValueError(kind)


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices(string.digits, k=count))


def _credit_card(rng: random.Random) -> str:
    """Sixteen digits in groups of four; the last one makes the Luhn sum a multiple of ten."""
    digits = "411111" + _digits(rng, 9)
    doubled = sum(sum(divmod(2 * int(digit), 10)) for digit in digits[::2])
    digits += str(-(doubled + sum(map(int, digits[1::2]))) % 10)
    return "-".join(digits[start : start + 4] for start in range(0, 16, 4))


def _iban(account: str) -> str:
    """A German IBAN; its check digits make the number 1 modulo 97 (D is 13 and E is 14)."""
    return f"DE{98 - int(account + '131400') % 97:02d}{account}"


def _new_pdf() -> FPDF:
    pdf = FPDF()
    pdf.set_creation_date(datetime(2026, 1, 1, tzinfo=UTC))
    pdf.set_font("Helvetica", size=10)
    return pdf


def _encrypt(user_password: str, owner_password: str) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(BytesIO(as_pdf(("This page is protected.",)))))
    writer.encrypt(user_password, owner_password, algorithm="AES-256")
    buffer = BytesIO()
    writer.write(buffer)
    return buffer.getvalue()
