//! `dsh-exec mcp` as a client of the protocol sees it: line by line, on the real daemon.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use dsh_tests::machine::{Feature, can_run, mcp_python};
use dsh_tests::process::{marked, unique_mark, wait_until};
use dsh_tests::{World, users};
use serde_json::{Value, json};

/// A client that says what it is told to.
struct Client {
    server: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Everything that came and was not an answer that was waited for.
    notifications: Vec<Value>,
    next: u64,
}

impl Client {
    fn start(world: &World, options: &[&str], capabilities: &Value) -> Self {
        let mut command = world.dsh_exec(&["--socket".as_ref(), world.socket().as_os_str(), "mcp".as_ref()]);
        command.args(options).current_dir(world.workspace());
        let mut server = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut client = Self {
            input: server.stdin.take().unwrap(),
            output: BufReader::new(server.stdout.take().unwrap()),
            server,
            notifications: Vec::new(),
            next: 1,
        };
        let hello = json!({"protocolVersion": "2025-06-18", "capabilities": capabilities,
            "clientInfo": {"name": "dsh-tests", "version": "1"}});
        let answer = client.ask("initialize", &hello);
        assert_eq!(answer["result"]["serverInfo"]["name"], "dsh-exec", "{answer}");
        client.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        client
    }

    fn say(&mut self, message: &Value) {
        writeln!(self.input, "{message}").unwrap();
    }

    fn send(&mut self, method: &str, params: &Value) -> u64 {
        let id = self.next;
        self.next += 1;
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// The answer to a request of ours; a question of the server is answered by `answers`.
    fn wait(&mut self, id: u64, answers: &dyn Fn(&Value) -> Value) -> Value {
        loop {
            let message = self.read();
            if message.get("method").is_none() && message["id"] == id {
                return message;
            }
            if message.get("id").is_some() {
                let answer = json!({"jsonrpc": "2.0", "id": message["id"], "result": answers(&message)});
                self.say(&answer);
            }
            self.notifications.push(message);
        }
    }

    fn ask(&mut self, method: &str, params: &Value) -> Value {
        let id = self.send(method, params);
        self.wait(id, &|question| panic!("a question that nobody expects: {question}"))
    }

    /// Text, whether it is an error, and the structured value of a call.
    fn bash(&mut self, arguments: &Value, answers: &dyn Fn(&Value) -> Value) -> (String, bool, Value) {
        let params = json!({"name": "bash", "arguments": arguments, "_meta": {"progressToken": "p"}});
        let id = self.send("tools/call", &params);
        let answer = self.wait(id, answers);
        let result = &answer["result"];
        let text = result["content"][0]["text"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"));
        (
            text.to_owned(),
            result["isError"] == true,
            result["structuredContent"].clone(),
        )
    }
}

impl Client {
    /// As a client that is closed does: the end of its input.
    fn leave(mut self) {
        let (input, _) = std::io::pipe().map(|(_, writer)| (writer, ())).unwrap();
        self.input = ChildStdin::from(std::os::fd::OwnedFd::from(input));
        assert!(self.server.wait().unwrap().success());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn no_questions(question: &Value) -> Value {
    panic!("a question that nobody expects: {question}")
}

fn arguments(command: &str) -> Value {
    json!({"command": command, "description": "a test"})
}

#[test]
fn the_tool_is_listed_and_runs_with_text_and_value() {
    let world = World::new(users()[0]);
    let mut client = Client::start(&world, &[], &json!({}));
    let tools = client.ask("tools/list", &json!({}));
    let tool = &tools["result"]["tools"][0];
    let names: Vec<&str> = tools["result"]["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| tool["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["bash", "task_output", "task_list", "task_kill"]);
    assert_eq!(tool["inputSchema"]["required"], json!(["command", "description"]));
    // This client cannot be asked, so a wider mode is not offered.
    assert!(tool["inputSchema"]["properties"].get("sandbox_permissions").is_none());
    let (text, error, value) = client.bash(&arguments("pwd; touch x; sleep 0.3; exit 3"), &no_questions);
    assert!(
        text.starts_with(&format!("{}\n[stderr]\n", world.workspace().display())),
        "{text}"
    );
    assert!(
        text.contains("[sandbox: file access denied under read-only mode]\n"),
        "{text}"
    );
    assert!(text.ends_with("[exit code: 3]") && !error, "{text}");
    assert_eq!(
        (&value["exitCode"], &value["sandbox"]["denials"][0]["errno"]),
        (&json!(3), &json!("EACCES"))
    );
    assert!(
        client
            .notifications
            .iter()
            .any(|message| message["method"] == "notifications/progress")
    );
    let (text, error, _) = client.bash(&json!({"command": "ls"}), &no_questions);
    assert_eq!(
        (text.as_str(), error),
        ("Error: invalid description: expected a non-empty string", true)
    );
    let answer = client.ask("tools/call", &json!({"name": "rm", "arguments": {}}));
    assert_eq!(answer["error"]["code"], -32602);
}

#[test]
fn the_user_is_asked_for_a_wider_mode_and_decides() {
    let world = World::new(users()[0]);
    let mut client = Client::start(&world, &[], &json!({"elicitation": {}}));
    let tools = client.ask("tools/list", &json!({}));
    assert!(
        tools["result"]["tools"][0]["inputSchema"]["properties"]
            .get("sandbox_permissions")
            .is_some()
    );
    let mut widen = arguments("touch made");
    widen["sandbox_permissions"] = "workspace-write".into();
    widen["justification"] = "the build writes".into();
    let made = world.workspace().join("made");
    for (answer, text) in [
        (
            json!({"action": "decline"}),
            "Error: the user rejected escalating this command to \"workspace-write\"",
        ),
        (
            json!({"action": "accept", "content": {"allow": false}}),
            "Error: the user rejected escalating this command to \"workspace-write\"",
        ),
        (
            json!({"action": "cancel"}),
            "Error: approval for escalating to \"workspace-write\" was cancelled",
        ),
    ] {
        let says = |question: &Value| {
            assert_eq!(question["method"], "elicitation/create");
            let message = question["params"]["message"].as_str().unwrap();
            assert_eq!(
                message,
                "escalate sandbox to workspace-write: the build writes\n\ntouch made"
            );
            answer.clone()
        };
        assert_eq!(client.bash(&widen, &says).0, text);
        assert!(!made.exists());
    }
    let yes = |_: &Value| json!({"action": "accept", "content": {"allow": true}});
    assert_eq!(client.bash(&widen, &yes).0, "(no output)");
    assert!(made.exists());
    let kept = std::fs::read_to_string(world.state().join("escalations.jsonl")).unwrap();
    let granted: Vec<Value> = kept
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["granted"].clone())
        .collect();
    assert_eq!(granted, [json!(false), json!(false), json!(false), json!(true)]);
}

#[test]
fn a_client_that_cannot_be_asked_hears_that_there_is_no_channel() {
    let world = World::new(users()[0]);
    let mut client = Client::start(&world, &[], &json!({}));
    let mut widen = arguments("touch made");
    widen["sandbox_permissions"] = "workspace-write".into();
    widen["justification"] = "the build writes".into();
    assert_eq!(
        client.bash(&widen, &no_questions).0,
        "Error: sandbox escalation to \"workspace-write\" requires approval, but no approval channel is available"
    );
    assert!(!world.workspace().join("made").exists());
    let text = client.bash(&arguments("touch made 2>/dev/null"), &no_questions).0;
    assert!(
        text.contains("denied under read-only mode]") && !text.contains("escalation available"),
        "{text}"
    );
}

#[test]
fn roots_are_the_workspace() {
    let world = World::new(users()[0]);
    let root = world.outside().join("a folder");
    std::fs::create_dir(&root).unwrap();
    let uri = format!("file://{}", root.display()).replace(' ', "%20");
    let mut client = Client::start(&world, &["--mode", "workspace-write"], &json!({"roots": {}}));
    let answers = |question: &Value| {
        assert_eq!(question["method"], "roots/list");
        json!({"roots": [{"uri": "https://example.org/"}, {"uri": uri}]})
    };
    let (text, _, value) = client.bash(&arguments("pwd; touch made"), &answers);
    assert_eq!(text, format!("{}\n", root.display()));
    assert_eq!(value["sandbox"]["mode"], "workspace-write");
    assert!(root.join("made").exists());
}

#[test]
fn a_cancelled_request_and_a_client_that_leaves_end_the_command() {
    let world = World::new(users()[0]);
    let (cancelled, left) = (unique_mark("cancelled"), unique_mark("left"));
    let mut client = Client::start(&world, &[], &json!({}));
    let start = |client: &mut Client, mark: &str| {
        let command = format!("export {mark}; setsid sleep 1000 & sleep 1000");
        let id = client.send("tools/call", &json!({"name": "bash", "arguments": arguments(&command)}));
        let mark = mark.to_owned();
        assert!(wait_until(Duration::from_secs(5), move || marked(&mark).len() >= 2));
        id
    };
    let id = start(&mut client, &cancelled);
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}));
    assert!(wait_until(Duration::from_secs(5), || marked(&cancelled).is_empty()));
    assert_eq!(client.bash(&arguments("echo on"), &no_questions).0, "on\n");
    start(&mut client, &left);
    let begun = Instant::now();
    drop(client);
    assert!(
        wait_until(Duration::from_secs(5), || marked(&left).is_empty()),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn the_protocol_s_own_python_client_runs_is_denied_and_escalates() {
    if !can_run("the_protocol_s_own_python_client", Feature::McpPython) {
        return;
    }
    let world = World::new(users()[0]);
    let script = dsh_tests::binaries::repository().join("tests/mcp/session.py");
    let output = world
        .command(mcp_python().unwrap())
        .arg(script)
        .arg(world.binary("dsh-exec"))
        .arg(world.socket())
        .arg(world.workspace())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.ends_with("all as it must be\n"), "{text}");
}

#[test]
fn background_tasks_are_started_read_listed_and_killed_and_end_with_the_client() {
    let world = World::new(users()[0]);
    let mark = unique_mark("mcp-task");
    let mut client = Client::start(&world, &["--mode", "workspace-write"], &json!({}));
    let ask = |client: &mut Client, tool: &str, arguments: Value| {
        let answer = client.ask("tools/call", &json!({"name": tool, "arguments": arguments}));
        let text = answer["result"]["content"][0]["text"]
            .as_str()
            .unwrap_or_else(|| panic!("{answer}"));
        text.to_owned()
    };
    assert_eq!(ask(&mut client, "task_list", json!({})), "(no background tasks)");
    let mut serve = arguments(&format!(
        "export {mark}; echo listening; setsid sleep 1000 & sleep 1000"
    ));
    serve["run_in_background"] = true.into();
    let (text, error, value) = client.bash(&serve, &no_questions);
    assert_eq!((text.as_str(), error), ("started background task bash-1", false));
    assert_eq!(value, json!({"kind": "background", "taskId": "bash-1"}));
    let mut short = arguments("echo out; echo err >&2; exit 4");
    short["run_in_background"] = true.into();
    client.bash(&short, &no_questions);
    let wait = json!({"task_id": "bash-2", "wait": true});
    assert_eq!(
        ask(&mut client, "task_output", wait.clone()),
        "out\n[stderr]\nerr\n[status: completed, exit code: 4]"
    );
    assert_eq!(
        ask(&mut client, "task_output", wait),
        "(no new output)\n[status: completed, exit code: 4]"
    );
    assert_eq!(
        ask(&mut client, "task_list", json!({})),
        "bash-1 [bash] running — a test\nbash-2 [bash] completed, exit code: 4 — a test"
    );
    assert_eq!(
        ask(&mut client, "task_output", json!({"task_id": "bash-9"})),
        "Error: unknown task bash-9"
    );
    assert_eq!(
        ask(&mut client, "task_output", json!({})),
        "Error: invalid task_id: expected a non-empty string"
    );
    assert_eq!(
        ask(&mut client, "task_kill", json!({"task_id": "bash-2"})),
        "task bash-2 had already finished [status: completed, exit code: 4]"
    );
    // Another client does not know of any of it.
    let mut other = Client::start(&world, &[], &json!({}));
    assert_eq!(ask(&mut other, "task_list", json!({})), "(no background tasks)");
    assert_eq!(
        ask(&mut other, "task_kill", json!({"task_id": "bash-1"})),
        "Error: unknown task bash-1"
    );
    assert!(marked(&mark).len() >= 2);
    client.leave();
    assert!(wait_until(Duration::from_secs(5), || marked(&mark).is_empty()));
}
