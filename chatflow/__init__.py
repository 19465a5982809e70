from chatflow.core.agent import Agent
from chatflow.core.memory import SessionStore
from chatflow.core.messages import *
from chatflow.core.session import SessionContext
