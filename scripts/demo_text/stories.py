"""Stories of a few sentences, from plots with slots."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .words import ADJECTIVES, ANIMALS, BOYS, COLORS, FOODS, GIRLS, NAMES, OBJECTS, OUTDOORS, PEOPLE, _words, expand

OPENINGS = (
    "Once upon a time, there was a {adj} {K} named {N}. {He} lived in {home}.",
    "Once upon a time, there lived a {adj} {K} [named|called] {N} in {home}.",
    "Once upon a time, in {home}, there lived a {K} named {N}. {N} was very {adj}.",
    "Long ago, there was a {K} named {N}. {N} was {adj} and lived in {home}.",
    "There once was a {adj} {K} [named|called] {N} who lived in {home}.",
    "{N} was a {adj} {K} who lived in {home}.",
    "In {home}, there lived a {adj} {K} named {N}.",
)
HOMES = (
    "a [small|little|warm|cozy|old|tall] [house|cottage|hut] [near the river|by the sea|at the edge of the forest|on a "
    "green hill|under a big oak tree|behind the old mill]",
    "a [quiet|little|happy|busy] village [near the mountains|by the lake|in the valley|by the sea]",
    "a [big|dark|green|quiet] forest [far away|near the mountains|behind the hills]",
)
HABITS = (
    "Every [morning|day|evening], {he} [walked|went] to the {P} to [look at the birds|sing a song|play|watch the "
    "clouds].",
    "{N} loved [{F}|to eat {F}] more than anything else.",
    "{N} [liked|loved] to [sing|dance|read|paint|play|tell jokes] with {his} friends.",
    "[Everyone|All the neighbors] liked {N}, because {he} was [always|so] [friendly|cheerful|helpful].",
)
DAYS_START = (
    "One [day|morning|afternoon|evening], ",
    "One [sunny|rainy|windy|cold|warm|quiet] [day|morning|afternoon|evening], ",
    "Early one morning, ",
    "On a [sunny|cold|bright] day in [spring|summer|autumn|winter], ",
)
ENDINGS = (
    "From that day on, {N} and {M} were best friends.",
    "{N} went home with a happy heart and slept well that night.",
    "And they all lived happily ever after.",
    "That night, {N} looked at the stars and smiled.",
    "{N} never forgot that day.",
    "And so the day ended with [a song|a big meal|laughter and music].",
    "{N} learned that [a good friend is worth more than gold|it is good to ask for help|kind words open every door|"
    "being brave does not mean having no fear|sharing makes everything better|small steps lead far].",
)
# Each plot is a list of sentences in order; a sentence in round brackets may be left out.
PLOTS: tuple[tuple[str, ...], ...] = (
    (  # something is lost and found
        "{start}{N} saw that {his} {color} {O} was gone.",
        "[{N} was very sad.|{N} began to cry.|\"Where is my {O}?\" asked {N}.|\"Oh no, my {O}!\" cried {N}.]",
        "{He} looked [under the bed|behind the door|in every corner] and in the {P}, but {he} could not find it.",
        "(Then it began to rain, and {N} felt [cold|tired|alone].)",
        "[Then|Soon|At last] {he} met a {fadj} {L} named {M}.",
        "[\"Why are you so sad?\" asked {M}.|\"What are you looking for?\" asked {M}.]",
        "[\"I have lost my {O},\" said {N}.|\"My {color} {O} is gone,\" said {N}.]",
        "[\"I will help you,\" said {M}.|\"Do not worry, we will find it together,\" said {M}.]",
        "[They searched all day long.|Together they walked to the {Q}.|They looked and looked.]",
        "[Finally|At last|After a while], {M} found the {O} [under a big stone|behind a tree|in the {Q}|in the tall "
        "grass].",
        "[\"Thank you, {M}!\" said {N}.|{N} was so happy that {he} danced.|{N} hugged {M} and laughed.]",
    ),
    (  # a way is blocked
        "{start}{N} wanted to go to the {P} to [visit {his} grandmother|buy some {F}|see the {color} flowers].",
        "(On the way, {he} sang a little song.)",
        "But the [bridge was broken|road was full of snow|river was too wide|gate was closed].",
        "[\"How can I get to the {P} now?\" {N} asked.|{N} sat down and did not know what to do.]",
        "[A {fadj} {L} named {M} came by.|Just then, a {L} named {M} came along the path.]",
        "[\"I know another way,\" said {M}.|\"Follow me,\" said {M}, \"I know a safe path.\"]",
        "They walked [through the {Q}|past the {Q}|around the {Q}] [hand in hand|for a long time|side by side].",
        "(On the way, they shared [some|a bag of] {F}.)",
        "[When the sun went down|At noon|Before it was dark], they reached the {P}.",
        "[\"I could not have done it without you,\" said {N}.|\"Thank you for your help,\" said {N}.|{N} thanked {M} "
        "with all {his} heart.]",
    ),
    (  # a storm
        "{start}a big storm came over the {P}.",
        "The wind [blew hard|howled], and the rain [fell and fell|beat on the roof].",
        "[{N} closed the door and lit a candle.|{N} made a fire and sat down beside it.]",
        "[Suddenly|All at once], there was a knock at the door.",
        "[It was a wet {L} named {M}.|Outside stood a {L} named {M}, cold and wet.]",
        "[\"May I come in?\" asked {M}.|\"Please help me, I am so cold,\" said {M}.]",
        "[\"Of course, come in,\" said {N}.|\"Sit by the fire and get warm,\" said {N}.]",
        "{N} gave {M} [some|a bowl of] {F}, and they [talked all night|told each other stories|played games until "
        "morning].",
        "(\"Tell me about the {Q},\" said {N}, and {M} told of far places.)",
        "In the morning, the storm was over and [the sky was blue|a rainbow stood over the {P}|the sun was shining].",
        "(Before {M} left, {N} gave {M} a {color} {O} as a gift.)",
    ),
    (  # learning something
        "{N} had one big wish: {he} wanted to learn to [swim|sing|dance|bake|paint|fly a kite|play the flute].",
        "{start}{N} tried it for the first time, but [it went wrong|it was too hard|everybody laughed].",
        "[{N} was sad and wanted to give up.|\"I will never learn it,\" said {N}.]",
        "[An old {L} named {M} saw it.|A wise {L} named {M} was watching from the {P}.]",
        "[\"Nobody can do it at once,\" said {M}.|\"Try again, and do not be afraid,\" said {M}.]",
        "So {N} [tried again every day|practiced every morning|worked hard for many days].",
        "(Sometimes {he} fell, but {he} always got up again.)",
        "(In the evening, {M} brought {F} for both of them.)",
        "[After many days|After a few weeks|One day in spring], {N} could do it.",
        "[\"Look, I did it!\" cried {N}.|Everyone in the {Q} clapped.|\"I knew you could do it,\" said {M}.]",
    ),
    (  # a present
        "{N} had a friend, a {L} named {M}.",
        "{start}it was the birthday of {M}, and {N} wanted to give {M} a [special|nice|wonderful] gift.",
        "[But {N} had no money.|But all the shops were closed.|But {he} did not know what {M} liked.]",
        "{He} went to the {P} and thought about it for a long time.",
        "[There|Under a tree|On the ground], {he} found [a little wood|an old board|a piece of cloth].",
        "[From it, {he} made a {color} {O}.|With it, {he} made a beautiful {color} {O}.]",
        "({He} worked until late at night.)",
        "In the evening, {N} brought the {O} to {M}.",
        "[\"This is the best gift of all!\" said {M}.|\"How beautiful!\" cried {M}.|{M} was happy beyond all "
        "words.]",
        "They [ate {F}|ate cake and {F}] and danced [until midnight|all evening].",
    ),
    (  # a sound in the night
        "{start}{N} heard a strange sound from the {P}.",
        "[\"What can that be?\" {he} asked.|{His} heart beat fast.|{He} was a little afraid.]",
        "{He} took {his} {O} and [walked slowly to|went quietly to|tiptoed to] the {P}.",
        "(The moon was shining, and everything was quiet.)",
        "There was the sound again, [louder than before|very near|behind the door]!",
        "[{N} opened the door.|{N} looked around the corner.] There sat a little {L}.",
        "[\"Please do not be angry,\" said the {L}. \"My name is {M}, and I have lost my way.\"|\"I am {M},\" said the "
        "{L}, \"and I cannot find my way home.\"]",
        "[{N} laughed.|{N} was glad that it was nothing bad.] \"[I will bring you home|Come, I will show you the "
        "way],\" {he} said.",
        "So they walked through the {Q} together, and [the stars showed them the way|the moon was their lamp].",
        "(At home, the mother of {M} gave them warm {F}.)",
    ),
    (  # a race
        "{start}a {L} named {M} said, \"I am the fastest in the whole [land|village|forest].\"",
        "[\"Let us have a race to the {P},\" said {N}.|\"Then race with me to the {P},\" said {N}.]",
        "Everybody came to watch, and {M} [ran away like the wind|was soon far ahead].",
        "[But on the way, {M} saw some {F} and stopped to eat.|But {M} became tired and lay down to sleep.]",
        "{N} [did not stop|went on, step by step|kept going], [past|through] the {Q}.",
        "(It was hot, and the way was long.)",
        "When {M} [woke up|looked up], {N} was already at the {P}.",
        "[\"You have won,\" said {M}. \"Well done!\"|\"I should not have been so proud,\" said {M}.]",
        "{N} [smiled and gave {M} a {color} {O}|shared the prize, a basket of {F}, with {M}].",
    ),
    (  # someone is ill
        "{start}{N} heard that {M}, the {L}, was ill.",
        "[\"I must do something,\" said {N}.|\"Poor {M}!\" said {N}.]",
        "{He} went to the {P} and [bought|found] some {F}.",
        "[Then {he} cooked a big pot of soup.|At home, {he} made tea with honey.]",
        "{N} carried everything through the {Q} to the house of {M}.",
        "(The way was long, and the basket was heavy.)",
        "{M} was lying in bed [under a {color} blanket|with a hot head].",
        "[\"How kind of you to come,\" said {M}.|\"You are a true friend,\" said {M}.]",
        "{N} [read a story aloud|sang a quiet song|told funny stories], and {M} [fell asleep|began to smile].",
        "After [two|three|a few] days, {M} was well again, and they went to the {P} together.",
    ),
    (  # a seed
        "{start}{N} found a {color} seed in the {P}.",
        "[\"What will grow from it?\" {he} asked.|{He} had never seen such a seed before.]",
        "{He} put it into the ground and gave it water [every day|every morning].",
        "[For a long time, nothing happened.|Days went by, but nothing grew.]",
        "[\"It is only a stone,\" said {M} the {L}.|{M}, a {L} from the {Q}, laughed about it.]",
        "But {N} [waited|did not give up|went on].",
        "[Then, one morning,|After the first warm rain,] there was a [small|tiny] green leaf.",
        "The plant grew and grew, until it was [as high as the house|bigger than {N}].",
        "[In summer, it was full of {F}.|In autumn, it had a hundred {color} flowers.]",
        "{N} [invited everyone to a feast|gave some to every neighbor], and {M} was the first to come.",
    ),
    (  # a journey
        "{start}{N} found an old map with a {color} line on it.",
        "[\"It shows the way to a treasure!\" said {he}.|The line led to the {P}, far away.]",
        "{He} packed some {F} and a {O}, and [set off|went on {his} way].",
        "In the {Q}, {he} met a {fadj} {L} named {M}. [\"May I come with you?\" asked {M}.|\"Take me with you,\" said "
        "{M}.]",
        "Together they [crossed a wide river|climbed a high mountain|walked for three days].",
        "(At night, they slept under the stars.)",
        "[At last|Finally], they came to the {P} and found [an old box|a big stone|a small door].",
        "[Inside was no gold, but a letter|Under it was no gold, but a letter]: \"The best treasure is a friend.\"",
        "{N} and {M} looked at each other and [laughed|smiled].",
    ),
    (  # a quarrel
        "{N} and {M} the {L} were [neighbors|good friends].",
        "{start}they both wanted to have the same {color} {O}.",
        "[\"It is mine!\" cried {N}.|\"I saw it first,\" said {N}.] [\"No, it is mine!\" cried {M}.|\"That is not "
        "true,\" said {M}.]",
        "They pulled and pulled, until the {O} [broke|fell into the river].",
        "[Now nobody had it, and both were sad.|{N} ran to the {P} and cried.]",
        "After [a while|an hour], {N} said, \"[I am sorry|That was wrong of me].\"",
        "\"I am sorry too,\" said {M}. \"[Let us make a new one|Let us never fight again].\"",
        "So they went to the {Q} and made a new {O}, [even nicer than the old one|big enough for two].",
        "(Then they ate {F} together.)",
    ),
    (  # a rescue
        "{start}{N} was walking through the {P} when {he} heard someone call for help.",
        "A {L} named {M} had fallen into [a deep hole|the cold water].",
        "[\"Hold on, I am coming!\" cried {N}.|\"Do not be afraid,\" called {N}.]",
        "{N} [looked around and found a long rope|took a long branch|ran to the {Q} to get a ladder].",
        "(It was not easy, for {M} was heavy.)",
        "{He} pulled with all {his} strength, and [at last|finally] {M} was safe.",
        "[\"You saved my life,\" said {M}.|\"How can I ever thank you?\" asked {M}.]",
        "[\"That is what friends are for,\" said {N}.|\"You would do the same for me,\" said {N}.]",
        "{M} gave {N} a {color} {O}, and {N} [kept it for all time|put it on the wall at home].",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class StoryRequest:
    """What a prompt fixes about a story; the rest is drawn."""

    kind: str | None = None
    name: str | None = None
    friend_kind: str | None = None
    adjective: str | None = None


def story_sentences(rng: random.Random, request: StoryRequest = StoryRequest()) -> list[str]:
    kind = request.kind or rng.choice(ANIMALS + list(PEOPLE) if rng.random() < 0.7 else ["girl", "boy"])
    if request.name:
        he = "she" if request.name in GIRLS else "he"
        if PEOPLE.get(kind, he) != he:
            kind = {"he": "boy", "she": "girl"}[he]
    else:
        he = PEOPLE.get(kind) or rng.choice(("he", "she"))
    name = request.name or rng.choice(BOYS if he == "he" else GIRLS)
    friend_kind = request.friend_kind or rng.choice([animal for animal in ANIMALS if animal != kind])
    his, him = ("his", "him") if he == "he" else ("her", "her")
    place, other_place = rng.sample(OUTDOORS, 2)
    slots = {
        "K": kind, "N": name, "he": he, "He": he.capitalize(), "his": his, "His": his.capitalize(), "him": him,
        "L": friend_kind, "M": rng.choice([n for n in NAMES if n != name]),
        "P": place, "Q": other_place, "O": rng.choice(OBJECTS), "F": rng.choice(FOODS), "color": rng.choice(COLORS),
        "adj": request.adjective or rng.choice(ADJECTIVES),
        "fadj": rng.choice(_words("friendly wise old kind funny clever gentle")),
    }  # fmt: skip
    slots["home"] = expand(rng, rng.choice(HOMES))
    slots["start"] = expand(rng, rng.choice(DAYS_START))
    plot = rng.choice(PLOTS)
    opening = rng.choice(OPENINGS[:3] if rng.random() < 0.5 else OPENINGS)
    sentences = [expand(rng, opening, slots)]
    if rng.random() < 0.6:
        sentences.append(expand(rng, rng.choice(HABITS), slots))
    for template in plot:
        if template.startswith("("):
            if rng.random() < 0.5:
                continue
            template = template[1:-1]
        sentences.append(expand(rng, template, slots))
    sentences.append(expand(rng, rng.choice(ENDINGS), slots))
    return sentences


def story(rng: random.Random, request: StoryRequest = StoryRequest()) -> str:
    """A story in one to three paragraphs."""
    sentences = story_sentences(rng, request)
    if rng.random() < 0.7:
        return " ".join(sentences)
    cut = rng.randint(2, len(sentences) - 2)
    return " ".join(sentences[:cut]) + "\n\n" + " ".join(sentences[cut:])
