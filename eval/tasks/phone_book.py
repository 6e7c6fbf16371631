"""Phone book look-up (arXiv:2402.01032): lines of name and number, two shots from the book, then a name."""

from functools import cache

from ..samples import Render, Request, Sample
from ..vocabulary import distinct, draw_name


def phone_book(request: Request) -> Render:
    """Ten digits, exactly. A unit of filler is another line; one book serves as many questions as there are depths."""
    per_book = len(request.depths)

    @cache
    def lines(number: int, count: int) -> list[tuple[str, str]]:
        generator = request.random("book", number)
        names = distinct(draw_name, generator)
        return [(next(names), str(generator.randint(10**9, 10**10 - 1))) for _ in range(count)]

    @cache
    def book(number: int, count: int) -> str:
        return "\n".join(f"{name}: {digits}" for name, digits in lines(number, count))

    def render(index: int, units: int) -> Sample:
        number, depth, count = index // per_book, request.depth(index), units + 3
        own = lines(number, count)
        place = round(depth * (count - 1))
        name, digits = own[place]
        others = [shot for shot in request.random("shots", index).sample(range(count), k=3) if shot != place]
        shots = "\n".join(f"{other}: {its_digits}" for other, its_digits in (own[shot] for shot in others[:2]))
        return Sample(
            input=f"A phone book:\n\n{book(number, count)}\n\nNumbers from the phone book:\n\n{shots}\n{name}:",
            outputs=[digits],
            answer=f" {digits}",
            depth=depth,
        )

    return render
