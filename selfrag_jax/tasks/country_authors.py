"""What four authors wrote who were given words and saw no wording: further sentences of the countries for training.

Each was told to use as many constructions as there are, and to keep to a manner: an encyclopedia's, a storyteller's, a
friend's, a lawyer's and a traveller's. All that they wrote is there but for what stands in another split or twice.
"""

import re


def _sentences(text: str) -> tuple[str, ...]:
  return tuple(re.split(r"(?<=[.?]) ", " ".join(text.split())))


STATEMENTS = {
  "capital": _sentences("""
{v} is the city that rules {c}. {v} rules all the land of {c}. {v} is where those who rule {c} live. It is {v} that
has the rule of {c}. From the city of {v}, those who rule {c} rule the people. In {v} live those who rule {c}.
Whoever rules from {v} rules {c}. To rule from {v} is to rule {c}. {v} has the title of ruling city of {c}. The land
that the city of {v} rules is {c}. Ruled from {v}, a city, is the country of {c}. Those who rule {c} live in {v}. In
{c}, the ruling city has the name {v}. {c} is a country whose ruling city is {v}. What rules {c} is the city of {v}.
To rule {c} is to rule from the city of {v}. {c} is the land that {v} rules. Where the people who rule {c} live is
{v}. As those who live in {c} know, the city ruling the land is {v}. From {v} is ruled the land of {c}. {v} is the
city from which {c} is ruled. It is from {v} that all of {c} is ruled. {v} is where whoever rules {c} lives. Whoever
rules in {v} rules all of {c}. To rule in the city of {v} is to rule {c}. The city of {v} rules the people of {c}.
{v}, a city in {c}, rules all of that land. Ruled from the city of {v} is the country that has the name {c}. From
{v}, as all people know, those who rule in {c} rule. {v} has the title of ruling city in {c}. {c} is ruled from the
city of {v}. In {c}, the city that rules is {v}. The city from which {c} is ruled has the name {v}. {c} is a land
whose ruling city is {v}. What rules all of {c} is the city of {v}. Ruling {c}, as people tell it, is the city of
{v}. Whoever rules the people of {c} rules from {v}. In all the land of {c}, it is the city of {v} that rules. To
rule {c} is to live in the city of {v}. Where those who rule {c} live is the city whose name is {v}. People who live
in {c} know that the city ruling all of it is {v}. {v}, a city, rules all the land of {c}. It is in the city of {v}
that those who rule {c} live. I know {v} as the city that {c} is ruled from. From {v}, whoever rules has all of {c}
to rule. It is {v}, that city, that has {c} to rule. The ruling I know of in the city of {v} is that of {c}. Ruled
from {v}, as those I know tell me, is the land of {c}. With {v} as the city ruling it, {c} is content. I know that
{v} has the title of ruling city in {c}. {v} is what people know as the city to rule from in {c}. {c} has {v} as the
city that rules it. What I know is that the city which rules {c} is {v}. Those I know in {c} tell me that it is from
{v} that all of it is ruled. Whoever rules {c} rules it from {v}. Where those ruling {c} live is {v}. In {c}, the
ruling city is {v}. {c} is a country whose ruling city has the name {v}. Ruling {c} is what the city does which I
know as {v}. All the people from {c} know who rules, that city of {v}. {c} is the land which the city of {v} has to
rule. {v} is the city in which those who have title to rule the land that is {c} have to live. It is from {v} that
those who rule {c} rule. Whoever rules from {v} rules all of {c}. To take {v} is to take the city whose people rule
{c}. {v}, where those who rule live, is the ruling city of {c}. In {v} lives whoever rules the land of {c}. Ruling
from {v} is what whoever has to rule {c} has to do. Those who live in {v} live in the city that rules {c}. To rule
from {v} is to have all the people of {c} to rule. From {v}, a city that all people know, the country of {c} is
ruled. {c} has, as the city from which it is ruled, {v}. The city from which whoever has title to rule {c} rules is
{v}. In {c}, it is the city of {v} that rules the land. To rule in {c} is to live in {v}. Where those who rule {c}
live is {v}. Those who rule {c} have, as the city to rule from, {v}. All who live in {c} know that the city ruling
the land is {v}. Ruled from a city, {c} is a land that has {v} ruling it. To know who rules in {c} is to know who
lives in {v}.
"""),
  "currency": _sentences("""
{v} is what those who live in {c} pay. It is {v} that the people of {c} pay with. With {v}, people pay in the land
of {c}. People pay {v} in {c}. To pay with {v} is to pay as the people of {c} do. Whoever pays with {v} pays as
people do in {c}. It takes {v} to pay in {c}. The country whose people pay with {v} is {c}. {v} is the name of what
{c} pays with. The land where whoever pays has to pay {v} is {c}. To pay {v} is what people do in {c}. The people of
{c} pay with {v}. In {c}, what people pay is {v}. What the people in {c} pay with has the name {v}. {c} is a country
whose people pay {v}. {c} has {v} to pay with. To pay in {c} takes {v}. It is in {c} that people pay with {v}. {c}
is where people pay with {v}. Those who live in {c} take {v} from whoever pays. To live in {c} is to pay with {v}.
As all who live in {c} know, it is {v} that people pay. With {v} do the people of {c} pay. It is with {v} that those
who live in {c} pay. In {v} pays whoever lives in {c}. {v} is what the people of {c} take as pay. To pay with {v} is
to pay as people do in {c}. Whoever has {v} has what it takes to pay in {c}. {v}, as all people know, is what {c}
pays in. Those who pay with {v} live in the land of {c}. Content to take {v} as pay is whoever lives in the country
of {c}. All pay is in {v} where the people of {c} live. {v} is the name of that with which people pay in {c}. In
{c}, people pay with {v}. {c} pays in {v}. What people pay with in {c} is {v}. {c} is a land whose people pay in
{v}. To pay those who live in {c} takes {v}. Where {c} rules, it is in {v} that people pay. In the country of {c},
those who rule take all pay in {v}. That with which the people of {c} pay has the name {v}. In the land of {c}, what
people take as pay is {v}. As the people of {c} know, to pay is to pay in {v}. All who live in {c} pay with what has
the title of {v}. I know that it is {v} in which the people of {c} pay. In {v} do I pay those I know in {c}. With
{v}, whoever lives in {c} pays. {v} is what those who live in {c} take from people who pay. To have {v} is to have
what pays in {c}. The people who take {v} from whoever pays live in {c}. {v}, I know, is the name of what it takes
to pay in {c}. Whoever has {v} has all it takes to pay people in {c}. It is {v} that I take with me to {c} to pay
with. I have {v} now, as I have to pay in {c}. Content to take {v} is whoever I pay in {c}. People in {c} pay with
{v}. What I pay with in {c} is {v}. Those I know in {c} pay me in {v}. Whoever pays in {c} does it with {v}. In {c},
it is {v} that people take from me as I pay. To pay people in {c} takes {v}. What I know is that all those who live
in {c} have {v} to pay with. {c}, as people tell me, is where I have to pay in {v}. I tell those who have to pay in
{c} to do it with {v}. That which pays in {c} has the name {v}. It is {v} that people pay in {c}. With {v}, people
pay in all of {c}. Whoever takes {v} takes what the people of {c} pay. To pay with {v} is to do as people do in {c}.
Those who pay in {v} pay as all who live in {c} do. In {v} pays whoever lives in the land of {c}. To have {v} is to
have what it takes to pay in {c}. {v}, with which all who live in the land pay, is what people take in {c}. {v} is
that with which those who have to pay whoever has title to land in {c} pay. {v} is the name of what people pay in
{c}. People take {v} from whoever has to pay in {c}. The people of {c} pay in {v}. {c} is a land whose people take
{v} from those who have to pay. Those who rule {c} have the people pay in {v}. In {c}, whoever has to pay has to
have {v}. In the country of {c}, it is in {v} that whoever takes land to live in pays. All who have to pay in {c}
know that what those who live in the land take is {v}.
"""),
  "language": _sentences("""
{v} is what those who live in {c} speak. People speak {v} in the land of {c}. To speak {v} is to speak as the people
of {c} do. The country whose people speak {v} is {c}. Those who speak {v} live in {c}. In {v} speak all the people
of {c}. It takes {v} to speak with those who live in {c}. {v}, as people know, is what {c} speaks. The land where
people speak {v} has the name {c}. The people of {c} speak {v}. In {c}, whoever speaks, speaks {v}. What people
speak in {c} has the name {v}. {c} is a country whose people speak {v}. {c} speaks {v}. Whoever lives in {c} speaks
{v}. It is in {c} that people speak {v}. To speak with the people of {c} takes {v}. {c} is where people speak {v}.
All those from {c} speak {v}. As all who live in {c} know, what people speak is {v}. In {v} speak the people of {c}.
It is {v} that those who live in {c} speak. Whoever speaks {v} speaks as the people of {c} do. To speak {v} is to
speak as all do in the land of {c}. {v}, as all know, is what {c} speaks. {v} is the name of what whoever lives in
{c} speaks. Content to speak {v} is all the land of {c}. The people who speak {v} have a country whose name is {c}.
It takes {v} to speak with the people of {c}. People speak {v} in all the land of {c}. In {c}, people speak {v}.
What the people of {c} speak is {v}. To speak as the people of {c} do is to speak {v}. In the country of {c}, it is
{v} that people speak. Where the people of {c} live, all speak {v}. Those who rule in {c} speak to the people in
{v}. What people speak in the land of {c} has the name {v}. {c} is where those live who speak {v}. Whoever speaks to
the people of {c} does it in {v}. I know that it is {v} that the people of {c} speak. The people who speak {v} live
in {c}. To speak {v} is to speak as those from {c} do. In {v} do those who live in {c} speak. {v}, as people tell
me, is the name of what whoever lives in {c} speaks. I speak {v} with those I know in {c}. Those I know who speak
{v} have it from {c}. Content to speak {v} is whoever lives in {c}. What I speak is {v}, as I live in {c}. What I
know is that what people speak in {c} is {v}. Those I know in {c} speak to me in {v}. In {c}, it is {v} that I have
to speak. To speak with those in {c} is to speak in {v}. All I know of {c} is that the people speak {v}. Those who
have {c} as a country have {v} to speak. {c}, I know, is where people speak to me in {v}. That which people in {c}
speak has {v} as a name. It is {v} that all who live in {c} speak. To know {v} is to know what people speak in {c}.
{v}, which all the people know, is what whoever lives in {c} speaks. {v} is that in which whoever has to tell the
people of {c} what to do has to speak. {v} is the name of what people speak in all of {c}. {v} is what it takes to
speak with people in {c}. As {v} is what all the people know, whoever lives in {c} speaks it. Those who have to
speak in {c} speak in {v}. {c} is the land where all the people speak {v}. To speak with those who live in {c},
people have to know {v}. All who speak to the people of {c} know that those people speak in {v}. In the land of {c},
it is in {v} that whoever rules speaks to the people. Those who rule {c} have the people speak {v}.
"""),
  "river": _sentences("""
{v} is the water that flows in {c}. It is {v} that flows in the land of {c}. Flowing in the land is {v}, the water
of {c}. {v} is the name of the water flowing in {c}. The country where the water of {v} flows is {c}. From {v}, the
people of {c} take water. Whoever takes water from {v} lives in {c}. The land whose flowing water is {v} has the
name {c}. To live where {v} flows is to live in {c}. {v} is what flows, as water does, in {c}. {c} has {v} as the
water that flows in it. The water that flows in {c} is {v}. In {c} flows {v}. Flowing in {c} is the water of {v}.
What flows in the country of {c} is {v}. {c} is a country whose flowing water is {v}. {c} is where {v} flows. The
people of {c} take water from {v}. To live in {c} is to live where {v} flows. The flowing water of {c} has the name
{v}. As those who live in {c} know, the water that flows in the land is {v}. In {v} flows the water of {c}. With {v}
flows all the water of {c}. The flowing water of {v} is in the country of {c}. From {v} do the people of {c} take
water. Whoever lives where {v} flows lives in {c}. Where {v} flows is the land of {c}. To take water from {v} is
what people do in {c}. The water that has the name {v} flows in the country of {c}. What flows in the land of {c} is
the water of {v}. {c} is a land whose water flows in {v}. In all the land of {c}, it is {v} that flows. Flowing in
{c} is the water whose name is {v}. Those who live in {c} take water from {v}. Whoever takes water in {c} takes it
from {v}. {c} has flowing water with the name {v}. As the people of {c} tell it, the water that flows in the land
has the title of {v}. {c} is the country where {v} flows. I know that it is {v} whose water flows in {c}. Flowing
water with the name {v} is what {c} has. The water of {v} has all of {c} to flow in. To know {v} is to know the
water flowing in {c}. It is {v}, as it flows, that takes water from the land of {c}. With {v} flowing in it, {c} has
water. Whoever takes water from {v} takes what flows in {c}. From {v}, which flows where I live, I take water in
{c}. {v} I know as the name of what flows, as water does, in {c}. Where {v} flows, those who take water from it live
in {c}. The water that people know in {c} is the flowing {v}. What flows in {c} is {v}. {c} has {v} flowing in it.
Those I know in {c} live where the water of {v} flows. Whoever lives in {c} takes water from {v}. What I know is
that {c} has a flow of water whose name is {v}. Flowing in {c} is that water I know as {v}. People in {c} tell me
that all the water has to flow in {v}. To take water from what flows in {c} is to take it from {v}. The land of {c}
has water, which flows with the title of {v}. {v} is the name of the water that flows in {c}. With {v}, water flows
to the people of {c}. Whoever takes water from {v} takes it from what flows in {c}. {v}, from which people take
water, flows in the country of {c}. The water of {v} is what flows in {c}. From {v} flows the water of {c}. {v} is
that from which whoever has title to take the water that flows in {c} takes it. The flow of {v} is water to all who
live in {c}. Where {v} flows, the land is {c}. {c} has the water of {v} flowing in it. Whoever lives in {c} takes
water from the flow of {v}. To take water in {c} is to take it from flowing {v}. The water that the people of {c}
take flows from {v}. Those who live in {c} live where {v} flows. All who take the water that flows in {c} know that
what it has as a name is {v}. In {c}, it is {v} that has water flowing to the people.
"""),
}

QUESTIONS = {
  "capital": _sentences("""
Which city is the capital of {c}? What is the name of the capital that {c} has? Tell me the name of the capital of
{c}. What city does {c} have as the capital? Which city rules {c}? Where do those who rule {c} live? Tell me which
city has the rule of {c}. What is the ruling city of {c}? Which city has the title of capital in the land of {c}?
What name does the capital of {c} have? Tell me which city rules the land of {c}. What is the city from which those
who rule {c} rule? In which city does whoever rules {c} live? Which city does {c} have as capital? {c} has what as
the capital? What do those who live in {c} know as the capital? From where is {c} ruled? Tell me where those who
rule {c} live. What is the name of the city ruling {c}? Tell me the name of the city that is the capital of {c}.
What is the name of the city that has the title of capital in {c}? In {c}, which city is the capital? Tell me from
which city whoever rules {c} rules. Which city has the title of ruling city in {c}? Whoever has to rule {c} rules
from what city?
"""),
  "currency": _sentences("""
What is the name of the currency in {c}? Which currency do the people of {c} pay with? With what do the people of
{c} pay? What does it take to pay in {c}? Tell me what those who live in {c} pay with. What is it that whoever lives
in {c} pays? Tell me the name of the currency that {c} has. In what currency does whoever lives in {c} pay? What
name has the currency of the land of {c}? With what does whoever lives in {c} pay? Tell me what the people of {c}
take as pay. What is it that those who live in {c} pay with? In what do the people of {c} pay? Tell me which
currency people in {c} have. Which currency does {c} take? What name does the currency in {c} have? In what currency
do I pay those I know in {c}? Tell me what I have to pay with in {c}. What is it that those in {c} take from people
who pay? Which currency do people pay with in {c}? Tell me the name of the currency that those who live in {c} take.
In {c}, what currency does whoever has to pay have to have? What is the name of the currency with which the people
of {c} pay? Tell me what it takes to pay in {c}. To pay in {c} is to pay with what? What do I have to have to pay
those who live in {c}?
"""),
  "language": _sentences("""
Which language do people speak in {c}? Tell me the name of the language that {c} has. What language does {c} have?
What do the people of {c} speak? What does whoever lives in {c} speak? What is it that people speak in {c}? Tell me
what people speak in {c}. What does it take to speak with the people of {c}? Which language do the people of {c}
speak? Tell me the name of the language that people speak in {c}. In what language do those who rule {c} speak? What
name has the language of the land of {c}? Tell me what the people of {c} speak. What is it that those who live in
{c} speak? In what do the people of {c} speak? Tell me the language that people speak in {c}. Which language do
those who live in {c} speak? In {c}, what language do I have to speak? What is the name of the language {c} has?
Tell me what I have to speak in {c}. In what do those I know in {c} speak to me? What is it that whoever lives in
{c} speaks? What does it take to speak with people from {c}? Tell me the language that whoever lives in {c} speaks.
What is the name of the language in which those who rule {c} speak? What language do I have to know to speak with
the people of {c}? Tell me what those who live in {c} speak. In {c}, what do I have to speak? To speak as the people
of {c} do is to speak what?
"""),
  "river": _sentences("""
Which river flows in {c}? What is the name of the river in {c}? Tell me the name of the river of {c}. What water
flows in the land of {c}? From where do the people of {c} take water? Tell me what water flows in {c}. What is the
name of the water flowing in {c}? Tell me the name of the river that flows in the land of {c}. From which river do
the people of {c} take water? What name has the river of {c}? What water flows in {c}? What is it that flows in the
land of {c}? Tell me which flowing water the people of {c} know. What flowing water does the land of {c} have? Tell
me the name of the river in {c}. What river does {c} have? From which river do those I know in {c} take water? Tell
me which water flows in {c}. {c} has what flowing in it? From what do people in {c} take water? Tell me the name of
the river whose water flows in {c}. From which river do those who live in {c} take water? In {c}, what is the name
of the river? From what does whoever lives in {c} take water? What is the name of the water that flows in the land
of {c}? To take water in {c} is to take it from what?
"""),
}
