"""A session of the MCP project's own Python client with `dsh-exec mcp`: run, be denied, escalate through elicitation, be cancelled.

    python tests/mcp/session.py DSH_EXEC SOCKET WORKSPACE

Prints the transcript. Leaves with an error when anything is not as it must be.
"""

import asyncio
import os
import sys

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client

questions = []


async def allow(context, params):
    questions.append(params.message)
    print("the user is asked:", params.message.replace("\n\n", " | "))
    return types.ElicitResult(action="accept", content={"allow": True})


async def main(program, socket, workspace):
    server = StdioServerParameters(
        command=program, args=["--socket", socket, "mcp", "--workspace", workspace], env=dict(os.environ)
    )
    async with stdio_client(server) as (read, write), ClientSession(read, write, elicitation_callback=allow) as session:
        hello = await session.initialize()
        print("connected to", hello.serverInfo.name)
        tools = (await session.list_tools()).tools
        assert [tool.name for tool in tools] == ["bash", "task_output", "task_list", "task_kill"], tools
        assert "sandbox_permissions" in tools[0].inputSchema["properties"]

        async def bash(command, **more):
            print("$", command, more or "")
            result = await session.call_tool("bash", {"command": command, "description": "a test", **more})
            text = result.content[0].text
            print(text)
            return text, result

        text, result = await bash("echo hello")
        assert text == "hello\n" and not result.isError
        assert result.structuredContent["exitCode"] == 0, result.structuredContent

        text, result = await bash("echo data > made")
        assert "[sandbox: file access denied under read-only mode]" in text, text
        assert "[sandbox: escalation available" in text, text
        assert result.structuredContent["sandbox"]["denials"][0]["operation"] == "create-file"
        assert not os.path.exists(os.path.join(workspace, "made"))

        wider = {"sandbox_permissions": "workspace-write", "justification": "the result has to be kept"}
        text, result = await bash("echo data > made", **wider)
        assert text == "(no output)", text
        assert questions == ["escalate sandbox to workspace-write: the result has to be kept\n\necho data > made"], questions
        with open(os.path.join(workspace, "made")) as made:
            assert made.read() == "data\n"

        text, _ = await bash("echo listening; sleep 1000", run_in_background=True)
        assert text == "started background task bash-1"

        async def about_task(tool, **arguments):
            result = await session.call_tool(tool, arguments)
            text = result.content[0].text
            print("%s %s\n%s" % (tool, arguments, text))
            return text

        while (text := await about_task("task_output", task_id="bash-1")).startswith("(no new output)"):
            await asyncio.sleep(0.1)
        assert text == "listening\n[status: running]", text
        assert await about_task("task_kill", task_id="bash-1", reason="seen enough") == "requested cancellation of task bash-1"
        text = await about_task("task_output", task_id="bash-1", wait=True)
        assert text == "(no new output)\n[status: killed, signal: SIGTERM]", text

        text, result = await bash("")
        assert result.isError and text == "Error: invalid command: expected a non-empty string"

        try:
            await asyncio.wait_for(bash("sleep 100"), 1)
        except TimeoutError:
            print("given up after a second")
        text, _ = await bash("echo still here")
        assert text == "still here\n"


asyncio.run(main(*sys.argv[1:]))
print("all as it must be")
