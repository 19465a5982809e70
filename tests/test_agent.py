from __future__ import annotations

import enum
import functools
from typing import TYPE_CHECKING, Any

import pytest

from chatflow.core.agent import Agent
from chatflow.core.messages import Handoff
from chatflow.core.tools import Tool, ToolContext, tool
from chatflow.engines.scripted import ScriptedEngine
from chatflow.exceptions import HandoffError, ToolError

if TYPE_CHECKING:
    from chatflow.core.engine import EngineReply, EngineRequest

SESSION: Any = object()
CONTEXT = ToolContext(session=SESSION, state={}, agent=Agent("Any"), idempotency_key="key-1")


class SilentEngine:
    async def generate(self, request: EngineRequest) -> EngineReply:
        raise NotImplementedError


def look_up(item: str) -> str:
    """Look it up."""
    return item


def other() -> None:
    """Something else."""


def handoff_tool(agent: Agent) -> Tool:
    """The tool by which *agent* hands over to the peer added last."""
    return agent.all_tools()[-1]


def test_agent_keeps_what_it_is_given() -> None:
    """An agent shows its arguments as attributes, sequences as tuples."""
    engine, peer, own, settings = SilentEngine(), Agent("Billing"), tool(look_up), {"temperature": 0}
    agent = Agent("Support", "Help.", "gpt-4o", [own], [peer], engine, settings=settings)
    assert (agent.name, agent.instructions, agent.model, agent.engine) == ("Support", "Help.", "gpt-4o", engine)
    assert (agent.tools, agent.handoffs) == ((own,), (peer,))
    settings.clear()
    assert agent.settings == {"temperature": 0}


def test_defaults() -> None:
    """An agent needs only a name."""
    agent = Agent("Support")
    assert (agent.instructions, agent.model, agent.engine) == ("", "gemini-2.5-flash", None)
    assert (agent.tools, agent.handoffs, agent.all_tools(), agent.settings) == ((), (), (), {})


@pytest.mark.parametrize("attribute", ["name", "instructions", "model", "engine", "tools", "handoffs", "settings"])
def test_agent_is_read_only(attribute: str) -> None:
    """An agent's attributes can't be set."""
    with pytest.raises(AttributeError):
        setattr(Agent("Support"), attribute, "other")


def test_repr_is_short() -> None:
    """An agent's repr names it, and cuts a long name."""
    assert repr(Agent("Support")) == "<Agent 'Support'>"
    assert len(repr(Agent("x" * 10_000))) < 100


def test_name_may_be_an_enum_of_strings() -> None:
    """An enum's member of type str is taken for its value."""

    class Name(enum.StrEnum):
        SUPPORT = "Support"

    assert type(Agent(Name.SUPPORT).name) is str


@pytest.mark.parametrize("argument", ["name", "model"])
@pytest.mark.parametrize(("value", "error"), [("", ValueError), (" \n", ValueError), (None, TypeError), (5, TypeError)])
def test_refused_name_or_model(argument: str, value: Any, error: type[Exception]) -> None:
    """A name or model that is blank or no text is refused."""
    with pytest.raises(error, match=f"^{argument} must"):
        Agent(**{"name": "Support", argument: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"instructions": None}, "instructions must be a string or a function, not NoneType"),
        ({"instructions": lambda one, two: ""}, "takes the session or nothing, and this one needs one, two"),
        ({"instructions": lambda *, tone: ""}, "takes the session or nothing, and this one needs tone"),
        ({"instructions": min}, "wrap it in a function of your own"),
        ({"engine": "gpt-4o"}, r"engine must have an async method generate\(request\); str has none"),
        ({"engine": ScriptedEngine}, r"engine must be an instance: ScriptedEngine\(...\), not the class itself"),
        ({"tools": look_up}, "tools must be a list or the like, not function"),
        ({"tools": "look_up"}, "tools must be a list or the like, not str"),
        ({"tools": [5]}, "a tool is made from a function, method or callable object, not int"),
        ({"handoffs": Agent("Billing")}, "handoffs must be a list or the like, not Agent"),
        ({"handoffs": ["Billing"]}, "handoffs are agents, not str"),
        ({"settings": ["temperature"]}, "settings must be a mapping, not list"),
        ({"settings": {5: 0}}, "a setting's name must be a string, not int"),
    ],
)
def test_refused_argument(arguments: dict[str, Any], message: str) -> None:
    """An argument of a wrong type is refused when the agent is made."""
    with pytest.raises(TypeError, match=message):
        Agent("Support", **arguments)


@pytest.mark.parametrize("name", ["instructions", "messages", "model", "stream", "tools"])
def test_setting_that_is_none(name: str) -> None:
    """A setting that every request has otherwise is refused when the agent is made, with what to do instead."""
    with pytest.raises(ValueError, match=rf"^settings can't hold '{name}': (give|call|they are)"):
        Agent("Support", settings={name: True})


def test_functions_become_tools() -> None:
    """A function among an agent's tools is made a tool."""
    (made,) = Agent("Support", tools=[look_up]).tools
    assert (made.name, made.description) == ("look_up", "Look it up.")


def test_add_tool_returns_the_tool() -> None:
    """add_tool returns the tool it was given or made."""
    agent, own = Agent("Support"), tool(look_up)
    assert agent.add_tool(own) is own
    made = agent.add_tool(other)
    assert agent.tools == (own, made)


def test_same_tool_twice() -> None:
    """Adding the same tool again changes nothing."""
    own = tool(look_up)
    agent = Agent("Support", tools=[own, own])
    assert agent.add_tool(own) is own
    assert agent.tools == (own,)


def test_two_tools_of_one_name() -> None:
    """A second tool of a name is refused, and the agent stays as it was."""
    agent = Agent("Support", tools=[look_up])
    with pytest.raises(ToolError, match="agent 'Support' has a tool named look_up already"):
        agent.add_tool(tool(name="look_up")(other))
    assert [each.description for each in agent.tools] == ["Look it up."]


def test_unbound_method_is_refused() -> None:
    """A decorated method is added from an instance, not from its class."""

    class Shop:
        @tool
        def look(self, item: str) -> str:
            return item

    with pytest.raises(ToolError, match="tool look is a method; add it from an instance of its class"):
        Agent("Support", tools=[Shop.look])
    assert [each.name for each in Agent("Support", tools=[Shop().look]).tools] == ["look"]


def test_tool_decorator() -> None:
    """@agent.tool adds a function as a tool, bare or with arguments, also one that is a tool already."""
    agent, colleague = Agent("Support"), Agent("Billing")

    @colleague.tool
    @agent.tool
    def first() -> None: ...

    @agent.tool(name="second", description="The second.", idempotent=True)
    def other_name() -> None: ...

    third = agent.tool(other, name="third")

    @agent.tool(requires_approval=True)
    def fourth() -> None: ...

    assert agent.tools == (first, other_name, third, fourth)
    assert [each.requires_approval for each in agent.tools] == [False, False, False, True]
    assert colleague.tools == (first,)
    assert (third.name, third.description) == ("third", "Something else.")
    assert (other_name.name, other_name.description, other_name.idempotent) == ("second", "The second.", True)


def test_tool_decorator_with_arguments_refuses_a_tool() -> None:
    """@agent.tool with arguments can't rename what is a tool already."""
    with pytest.raises(TypeError, match="<Tool look_up> is a tool already"):
        Agent("Support").tool(name="other")(tool(look_up))


async def test_handoff_tool_hands_off() -> None:
    """Each peer has a tool after the agent's own, and it returns a Handoff to that peer."""
    agent = Agent("Support", tools=[look_up], handoffs=[Agent("Billing"), Agent("Sales")])
    assert [each.name for each in agent.all_tools()] == ["look_up", "transfer_to_billing", "transfer_to_sales"]
    assert [each.name for each in agent.tools] == ["look_up"]
    handed = await agent.all_tools()[1].invoke({"reason": "An invoice."}, CONTEXT)
    assert handed == Handoff(target_agent_name="Billing", reason="An invoice.")
    assert await agent.all_tools()[2].invoke({}, CONTEXT) == Handoff(target_agent_name="Sales")


def test_handoff_tool_schema() -> None:
    """A handoff tool takes an optional reason and nothing else."""
    assert handoff_tool(Agent("Support", handoffs=[Agent("Billing")])).parameters == {
        "type": "object",
        "properties": {
            "reason": {
                "anyOf": [{"type": "string"}, {"type": "null"}],
                "default": None,
                "description": "Why, in a few words.",
            }
        },
        "additionalProperties": False,
    }


@pytest.mark.parametrize(
    ("instructions", "told"),
    [
        ("", ""),
        ("  \n", ""),
        (lambda: "Secret.", ""),
        ("Handle\n  invoices.", " It is told: Handle invoices."),
        ("x" * 120, " It is told: " + "x" * 120),
        ("x" * 121, " It is told: " + "x" * 119 + "…"),
    ],
)
def test_handoff_tool_description(instructions: Any, told: str) -> None:
    """A handoff tool names the peer as it is written, and gives the start of its instructions where they are text."""
    peer = Agent("Billing & more", instructions)
    described = handoff_tool(Agent("Support", handoffs=[peer])).description
    assert described == f'Hand the conversation over to the agent "Billing & more".{told}'


@pytest.mark.parametrize(
    ("name", "tool_name"),
    [
        ("Billing", "transfer_to_billing"),
        ("  Ventas & Cobros! ", "transfer_to_ventas_cobros"),
        ("Atención_2", "transfer_to_atencion_2"),
        ("Straße", "transfer_to_strasse"),
        ("サポート", "transfer_to_bdbdb22b"),
        ("サポート2", "transfer_to_2_8e1e7ec1"),
        ("🤖", "transfer_to_b0d12518"),
        ("Bot 🤖", "transfer_to_bot"),
        ("x" * 53, "transfer_to_" + "x" * 52),
        ("x" * 51 + " y", "transfer_to_" + "x" * 51),
        ("x" * 60 + "é本", "transfer_to_" + "x" * 43 + "_a4f8faec"),
    ],
)
def test_handoff_tool_name(name: str, tool_name: str) -> None:
    """A handoff tool's name is what providers accept of the peer's name, with a digest where letters are lost."""
    assert handoff_tool(Agent("Support", handoffs=[Agent(name)])).name == tool_name


def test_names_in_other_scripts_do_not_collide() -> None:
    """Two names that differ only in letters no provider accepts have two handoff tools."""
    agent = Agent("Support", handoffs=[Agent("サポートA"), Agent("営業A")])
    assert len({each.name for each in agent.all_tools()}) == 2


def test_same_agent_twice() -> None:
    """Adding the same peer again changes nothing."""
    peer = Agent("Billing")
    agent = Agent("Support", handoffs=[peer, peer])
    agent.add_handoff(peer)
    assert agent.handoffs == (peer,)


def test_handoffs_may_be_cyclic() -> None:
    """Two agents may hand over to each other."""
    billing = Agent("Billing")
    support = Agent("Support", handoffs=[billing])
    billing.add_handoff(support)
    assert support.reachable() == {"Support": support, "Billing": billing}
    assert billing.reachable() == {"Support": support, "Billing": billing}


def test_handoff_to_itself() -> None:
    """An agent can't hand over to itself."""
    agent = Agent("Support")
    with pytest.raises(HandoffError, match="agent 'Support' can't hand over to itself"):
        agent.add_handoff(agent)


@pytest.mark.parametrize(("one", "two"), [("Ventas!", "ventas"), ("Caf\u00e9", "Cafe\u0301"), ("x" * 53, "x" * 54)])
def test_names_that_collide_after_cleaning(one: str, two: str) -> None:
    """Two peers whose handoff tools would have one name are refused, and both are named."""
    agent = Agent("Support", handoffs=[Agent(one)])
    with pytest.raises(HandoffError) as caught:
        agent.add_handoff(Agent(two))
    assert repr(one) in str(caught.value)
    assert repr(two) in str(caught.value)
    assert [peer.name for peer in agent.handoffs] == [one]


def test_two_peers_of_one_name() -> None:
    """Two different agents of one name are refused as peers."""
    with pytest.raises(HandoffError, match="two different agents are named 'Billing'"):
        Agent("Support", handoffs=[Agent("Billing"), Agent("Billing")])


def test_peer_with_the_agents_own_name() -> None:
    """A different agent with the agent's own name is refused as its peer."""
    with pytest.raises(HandoffError, match="two different agents are named 'Support'"):
        Agent("Support", handoffs=[Agent("Support")])


def test_two_agents_of_one_name_within_reach() -> None:
    """A peer through which another agent of a known name can be reached is refused, and nothing is added."""
    support = Agent("Support", handoffs=[Agent("Billing")])
    with pytest.raises(HandoffError, match="two different agents are named 'Billing'"):
        support.add_handoff(Agent("Sales", handoffs=[Agent("Billing")]))
    assert [peer.name for peer in support.handoffs] == ["Billing"]


def test_reachable_sees_what_was_added_later() -> None:
    """Whether agents within reach are told apart by name is found out anew each time it is asked."""
    sales = Agent("Sales")
    support = Agent("Support", handoffs=[Agent("Billing"), sales])
    assert list(support.reachable()) == ["Support", "Billing", "Sales"]
    sales.add_handoff(Agent("Returns"))
    assert list(support.reachable()) == ["Support", "Billing", "Sales", "Returns"]
    sales.add_handoff(Agent("Billing"))
    with pytest.raises(HandoffError, match="two different agents are named 'Billing'"):
        support.reachable()


def test_reachable_walks_dense_graphs_once() -> None:
    """Agents that all know one another are walked without going in circles."""
    agents = [Agent(f"Agent {number}") for number in range(8)]
    for one in agents:
        for two in agents:
            if one is not two:
                one.add_handoff(two)
    assert list(agents[0].reachable().values()) == agents


def test_own_tool_with_a_handoff_tools_name() -> None:
    """An own tool and a handoff tool of one name are refused, whichever comes second, and both are named."""
    message = "agent 'Support' has a tool named transfer_to_billing, .* agent 'Billing' has that name too"
    taken = tool(name="transfer_to_billing")(look_up)
    with pytest.raises(HandoffError, match=message):
        Agent("Support", tools=[taken], handoffs=[Agent("Billing")])
    agent = Agent("Support", handoffs=[Agent("Billing")])
    with pytest.raises(HandoffError, match=message):
        agent.add_tool(taken)
    assert agent.tools == ()


class Tone:
    async def __call__(self, session: object) -> str:
        return f"async object {session is SESSION}"


async def of_session(session: object) -> str:
    """Instructions that are a function like most."""
    return f"async {session is SESSION}"


@pytest.mark.parametrize(
    ("instructions", "text"),
    [
        ("Help {name}.", "Help {name}."),
        ("", ""),
        (lambda: "nothing", "nothing"),
        (lambda session: f"one {session is SESSION}", "one True"),
        (lambda anything, /: f"positional {anything is SESSION}", "positional True"),
        (lambda session=None: f"named {session is SESSION}", "named True"),
        (lambda text="kept": text, "kept"),
        (lambda *args: f"any {args == (SESSION,)}", "any True"),
        (lambda **kwargs: f"none {kwargs}", "none {}"),
        (functools.partial(lambda tone, session: f"{tone} {session is SESSION}", "kind"), "kind True"),
        (of_session, "async True"),
        (Tone(), "async object True"),
    ],
)
async def test_render_instructions(instructions: Any, text: str) -> None:
    """Instructions are text as it is, or what a function of the session or of nothing returns, async or not."""
    assert await Agent("Support", instructions).render_instructions(SESSION) == text


async def test_instructions_that_return_no_text() -> None:
    """A function that returns something other than text is an error that names the agent."""
    instructions: Any = lambda: None  # noqa: E731
    with pytest.raises(TypeError, match="the instructions of agent 'Support' must return a string, not NoneType"):
        await Agent("Support", instructions).render_instructions(SESSION)


async def test_errors_of_instructions_propagate() -> None:
    """What a function of the instructions raises reaches the caller."""
    error = LookupError("tone")

    def fail() -> str:
        raise error

    with pytest.raises(LookupError) as caught:
        await Agent("Support", fail).render_instructions(SESSION)
    assert caught.value is error


def test_name_that_utf8_cannot_encode() -> None:
    """A name that no storage could keep is refused."""
    with pytest.raises(ValueError, match="name must be text that UTF-8 can encode"):
        Agent("\ud800")
