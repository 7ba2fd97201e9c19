//! The `bash` tool as a harness uses it, on the real daemon: texts, escalation, sessions that do not mix.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsh_client::ClientError;
use dsh_client::connection::{Connection, Event};
use dsh_client::tool::bash::{Answer, BashTool, BashValue, Call, Composition};
use dsh_client::tool::environment::{CallContext, Contributor, EnvironmentRegistry};
use dsh_client::tool::error::ToolError;
use dsh_client::tool::escalate::{Approval, ApprovalRequest, Approver, EscalationRecord, PendingApproval};
use dsh_client::tool::session::Session;
use dsh_client::tool::task::{Pending, TaskStarter};
use dsh_policy::result::StreamResult;
use dsh_policy::{BashExecRequest, SandboxMode};
use dsh_tests::process::{marked, unique_mark, wait_until};
use dsh_tests::{World, users};
use serde_json::{Value, json};

/// Answers like this, or never.
struct Says(Option<Approval>);

impl Approver for Says {
    fn ask<'a>(&'a self, _: &'a ApprovalRequest) -> PendingApproval<'a> {
        match self.0 {
            Some(answer) => Box::pin(std::future::ready(answer)),
            None => Box::pin(std::future::pending()),
        }
    }
}

type Records = Arc<Mutex<Vec<EscalationRecord>>>;

async fn tool(world: &World, approver: Option<Says>) -> (BashTool, Records) {
    let records = Records::default();
    let kept = Arc::clone(&records);
    let composition = Composition {
        environment: EnvironmentRegistry::new(Some(&world.home())),
        approver: approver.map(|says| Arc::new(says) as Arc<dyn Approver>),
        record: Arc::new(move |record| kept.lock().unwrap().push(record.clone())),
    };
    let connection = Connection::connect(&world.socket()).await.unwrap();
    (BashTool::new(connection, composition), records)
}

fn call(workspace: PathBuf, mode: Option<SandboxMode>) -> Call {
    Call {
        workspace,
        mode,
        agent: Some("agent".into()),
        context: CallContext {
            session: Some("s1".into()),
            session_log: None,
        },
    }
}

fn arguments(command: &str) -> Value {
    json!({"command": command, "description": "a test", "env": {"SNEAKED": "in"}, "stdoutMaxBytes": 1})
}

fn escalating(command: &str, target: &str) -> Value {
    let mut all = arguments(command);
    all["sandbox_permissions"] = target.into();
    all["justification"] = "it must".into();
    all
}

async fn text(tool: &BashTool, call: &Call, arguments: &Value) -> String {
    match tool.call(call, arguments, |_| {}).await {
        Ok(Answer { text, .. }) => text,
        Err(error) => error.text(),
    }
}

#[tokio::test]
async fn the_texts_are_those_of_the_contract() {
    let world = World::new(users()[0]);
    let (tool, _) = tool(&world, None).await;
    let call = call(world.workspace(), None);
    let denied = "[sandbox: file access denied under read-only mode]";
    for (command, expected) in [
        ("echo hi", "hi\n".to_owned()),
        ("true", "(no output)".into()),
        (
            "echo out; echo err >&2; exit 3",
            "out\n[stderr]\nerr\n[exit code: 3]".into(),
        ),
        ("kill -TERM $$", "(no output)\n[killed by signal: SIGTERM]".into()),
        ("echo '[exit code: 9]'", "[exit code: 9]\n".into()),
        ("touch x 2>/dev/null", format!("(no output)\n{denied}\n[exit code: 1]")),
        ("echo $DSH_SHELL $DSH_SESSION_ID $SNEAKED.", "1 s1 .\n".into()),
        (" ", "Error: invalid command: expected a non-empty string".into()),
    ] {
        assert_eq!(text(&tool, &call, &arguments(command)).await, expected, "{command}");
    }
    let mut limited = arguments("echo early; sleep 9");
    limited["timeoutMs"] = 300.into();
    assert_eq!(
        text(&tool, &call, &limited).await,
        "early\n[timed out after 300ms]\n[killed by signal: SIGTERM]"
    );
    let cut = text(&tool, &call, &arguments("seq 100000")).await;
    let path = cut
        .lines()
        .last()
        .unwrap()
        .strip_prefix("[output truncated; full output: ")
        .unwrap();
    assert_eq!(
        std::fs::metadata(path.strip_suffix(']').unwrap()).unwrap().len(),
        588_895
    );
    let mut background = arguments("true");
    background["run_in_background"] = true.into();
    assert_eq!(
        text(&tool, &call, &background).await,
        "Error: background tasks unavailable: no task runtime is composed; run the command in the foreground"
    );
    assert_eq!(
        text(&tool.enable_run_in_background(false), &call, &background).await,
        "Error: run_in_background is disabled for this deployment (enableRunInBackground: false)"
    );
}

#[tokio::test]
async fn the_value_says_what_it_is() {
    let world = World::new(users()[0]);
    let (tool, _) = tool(&world, None).await;
    let mut events = 0;
    let count = |event: &Event| events += usize::from(matches!(event, Event::Output { .. }));
    let answer = tool
        .call(&call(world.workspace(), None), &arguments("echo hi"), count)
        .await
        .unwrap();
    assert_eq!(events, 1);
    let json = serde_json::to_value(&answer.value).unwrap();
    assert_eq!((&json["kind"], &json["exitCode"]), (&json!("foreground"), &json!(0)));
    let schema = dsh_client::tool::schema::bash_value();
    for key in schema["oneOf"][0]["required"].as_array().unwrap() {
        assert!(json.get(key.as_str().unwrap()).is_some(), "{key}");
    }
    let BashValue::Foreground(result) = answer.value else {
        panic!("{:?}", answer.value)
    };
    assert_eq!(result.sandbox.mode, SandboxMode::ReadOnly);
}

#[tokio::test]
async fn a_wider_mode_is_granted_for_one_call_or_nothing_runs() {
    let world = World::new(users()[0]);
    let made = world.workspace().join("made");
    let make = escalating("touch made", "workspace-write");
    let refusals = [
        (
            Approval::Rejected,
            "Error: the user rejected escalating this command to \"workspace-write\"",
        ),
        (
            Approval::Cancelled,
            "Error: approval for escalating to \"workspace-write\" was cancelled",
        ),
        (
            Approval::Unavailable,
            "Error: sandbox escalation to \"workspace-write\" requires approval, but no approval channel is available",
        ),
    ];
    for (answer, message) in refusals {
        let (tool, records) = tool(&world, Some(Says(Some(answer)))).await;
        assert_eq!(text(&tool, &call(world.workspace(), None), &make).await, message);
        assert!(!made.exists(), "nothing ran");
        assert_eq!(records.lock().unwrap().len(), 1);
    }
    let (tool, records) = tool(&world, Some(Says(Some(Approval::AllowedOnce)))).await;
    let call = call(world.workspace(), None);
    assert_eq!(text(&tool, &call, &make).await, "(no output)");
    assert!(made.exists());
    assert_eq!(records.lock().unwrap()[0].outcome, Ok(()));
    // It was for that call; and the text of the next says how to ask.
    let after = text(&tool, &call, &arguments("touch again 2>/dev/null")).await;
    assert!(after.starts_with(
        "(no output)\n[sandbox: file access denied under read-only mode]\n[sandbox: escalation available"
    ));
    // The root stays: outside of it a grant of workspace-write changes nothing.
    let outside = escalating(
        &format!("touch {}/x 2>/dev/null", world.outside().display()),
        "workspace-write",
    );
    assert!(
        text(&tool, &call, &outside)
            .await
            .contains("denied under workspace-write mode")
    );
    let narrower = Call {
        mode: Some(SandboxMode::WorkspaceWrite),
        ..call
    };
    assert_eq!(
        text(&tool, &narrower, &make).await,
        "Error: sandbox escalation to \"workspace-write\" is not strictly wider than this call's current \"workspace-write\" mode"
    );
}

#[tokio::test]
async fn a_question_that_is_never_answered_ends_with_the_call() {
    let world = World::new(users()[0]);
    let (tool, records) = tool(&world, Some(Says(None))).await;
    let call = call(world.workspace(), None);
    let soon = tokio::time::sleep(Duration::from_millis(200));
    let make = escalating("touch made", "workspace-write");
    let error = tool.call_until(&call, &make, |_| {}, soon).await.unwrap_err();
    assert!(matches!(error, ToolError::Aborted));
    assert_eq!(error.text(), "Error: tool call aborted");
    assert!(!world.workspace().join("made").exists());
    let records = records.lock().unwrap();
    assert_eq!(
        (records.len(), records[0].outcome.clone()),
        (1, Err("tool call aborted".into()))
    );
    assert_eq!(records[0].request.as_ref().unwrap().session.as_deref(), Some("s1"));
}

#[tokio::test]
async fn an_aborted_call_ends_its_command() {
    let world = World::new(users()[0]);
    let (tool, _) = tool(&world, None).await;
    let mark = unique_mark("tool");
    let command = format!("export {mark}; setsid sleep 1000 & sleep 1000");
    let soon = tokio::time::sleep(Duration::from_millis(400));
    let call = call(world.workspace(), None);
    let error = tool
        .call_until(&call, &arguments(&command), |_| {}, soon)
        .await
        .unwrap_err();
    assert!(matches!(error, ToolError::Aborted));
    assert!(marked(&mark).is_empty(), "when the answer is there, nothing is left");
}

#[tokio::test]
async fn a_call_that_is_dropped_ends_its_command() {
    let world = World::new(users()[0]);
    let (tool, _) = tool(&world, None).await;
    let mark = unique_mark("tool");
    let command = arguments(&format!("export {mark}; setsid sleep 1000 & sleep 1000"));
    let call = call(world.workspace(), None);
    let dropped = tokio::time::timeout(Duration::from_millis(400), tool.call(&call, &command, |_| {})).await;
    assert!(dropped.is_err());
    let gone = tokio::task::spawn_blocking(move || wait_until(Duration::from_secs(5), || marked(&mark).is_empty()));
    assert!(gone.await.unwrap());
}

#[tokio::test]
async fn two_sessions_at_once_do_not_mix() {
    let world = World::new(users()[0]);
    let (tool, _) = tool(&world, None).await;
    let other = world.outside();
    let reading = call(world.workspace(), Some(SandboxMode::ReadOnly));
    let writing = Call {
        context: CallContext {
            session: Some("s2".into()),
            session_log: None,
        },
        ..call(other.clone(), Some(SandboxMode::WorkspaceWrite))
    };
    let command = arguments("pwd; echo $DSH_SESSION_ID; touch made 2>/dev/null; sleep 0.2");
    let (one, two) = tokio::join!(text(&tool, &reading, &command), text(&tool, &writing, &command));
    assert_eq!(one, format!("{}\ns1\n", world.workspace().display()));
    assert_eq!(two, format!("{}\ns2\n", other.display()));
    assert!(!world.workspace().join("made").exists() && other.join("made").exists());
}

#[tokio::test]
async fn what_a_bound_of_the_deployment_forbids_is_neither_asked_nor_offered() {
    let world = World::with_config(users()[0], "maxMode = \"workspace-write\"\n");
    let (tool, records) = tool(&world, Some(Says(Some(Approval::AllowedOnce)))).await;
    let call = call(world.workspace(), Some(SandboxMode::WorkspaceWrite));
    assert_eq!(
        text(&tool, &call, &escalating("touch made", "danger-full-access")).await,
        "Error: sandbox escalation to \"danger-full-access\" is not strictly wider than this call's current \"workspace-write\" mode"
    );
    assert_eq!(records.lock().unwrap()[0].request, None);
    assert!(!world.workspace().join("made").exists());
    let outside = arguments(&format!("touch {}/x 2>/dev/null", world.outside().display()));
    assert_eq!(
        text(&tool, &call, &outside).await,
        "(no output)\n[sandbox: file access denied under workspace-write mode]\n[exit code: 1]"
    );
}

#[tokio::test]
async fn a_refusal_without_an_agent_offers_nothing() {
    let world = World::new(users()[0]);
    let (tool, _) = tool(&world, Some(Says(Some(Approval::AllowedOnce)))).await;
    let nobody = Call {
        agent: None,
        ..call(world.workspace(), None)
    };
    assert_eq!(
        text(&tool, &nobody, &arguments("touch x 2>/dev/null")).await,
        "(no output)\n[sandbox: file access denied under read-only mode]\n[exit code: 1]"
    );
}

#[tokio::test]
async fn a_session_brings_its_workspace_mode_and_log_and_keeps_them_over_a_restart() {
    let world = World::new(users()[0]);
    let (tool, _) = tool(&world, None).await;
    let log = world.folder().join("s.jsonl");
    let open = || Session::open("s9", Some(world.workspace()), Some(&log)).unwrap();
    let session = open();
    let touch = arguments("touch made 2>/dev/null; echo $? $DSH_SESSION_ID $DSH_SESSION_JSONL");
    let told = |code: u32| format!("{code} s9 {}\n", log.display());
    assert_eq!(text(&tool, &session.call(None).unwrap(), &touch).await, told(1));
    session.switch(Some(SandboxMode::WorkspaceWrite)).unwrap();
    let again = open();
    assert_eq!(text(&tool, &again.call(None).unwrap(), &touch).await, told(0));
    assert!(world.workspace().join("made").exists());
}

#[tokio::test]
async fn both_streams_are_cut_at_their_own_ends_and_a_trapped_timeout_is_one() {
    let world = World::with_config(users()[0], "keptBytes = 1000\n");
    let (tool, _) = tool(&world, None).await;
    let call = call(world.workspace(), None);
    let cut = arguments("seq 1 5000; seq 5000 9999 >&2; kill -SEGV $$");
    let Answer { text: shown, value } = tool.call(&call, &cut, |_| {}).await.unwrap();
    let BashValue::Foreground(result) = value else {
        panic!("{value:?}")
    };
    let (out, err) = (&result.stdout, &result.stderr);
    let path = |stream: &StreamResult| stream.spill_path.clone().unwrap().display();
    assert_eq!(
        shown,
        format!(
            "{}[output truncated; full output: {}]\n[stderr]\n{}[output truncated; full output: {}]\n[killed by signal: SIGSEGV]",
            out.text,
            path(out),
            err.text,
            path(err)
        )
    );
    let lines = |from: u32, to: u32| (from..=to).map(|n| format!("{n}\n")).collect::<String>();
    assert_eq!(std::fs::read_to_string(path(out)).unwrap(), lines(1, 5000));
    assert_eq!(std::fs::read_to_string(path(err)).unwrap(), lines(5000, 9999));

    let mut trapping = arguments("exec 2>/dev/null; trap 'exit 0' TERM; echo early; while :; do sleep 0.01; done");
    trapping["timeoutMs"] = 300.into();
    assert_eq!(text(&tool, &call, &trapping).await, "early\n[timed out after 300ms]");
}

/// Keeps what it is asked to start.
struct Starter {
    full: bool,
    started: Mutex<Vec<BashExecRequest>>,
}

impl TaskStarter for Starter {
    fn preflight<'a>(&'a self, _: Option<&'a str>) -> Pending<'a, Result<(), String>> {
        let answer = if self.full {
            Err("8 of 8 are running".to_owned())
        } else {
            Ok(())
        };
        Box::pin(std::future::ready(answer))
    }

    fn start(&self, request: BashExecRequest) -> Pending<'_, Result<String, ClientError>> {
        self.started.lock().unwrap().push(request);
        Box::pin(std::future::ready(Ok("bash-1".into())))
    }
}

#[tokio::test]
async fn a_task_is_started_after_everything_that_could_forbid_it() {
    let world = World::new(users()[0]);
    let call = call(world.workspace(), None);
    let in_background = |mut arguments: Value| {
        arguments["run_in_background"] = true.into();
        arguments
    };
    let plain = in_background(arguments("true"));
    let wider = in_background(escalating("true", "workspace-write"));
    let rows = [
        (
            false,
            Approval::Rejected,
            &plain,
            "started background task bash-1",
            vec![None],
        ),
        (
            false,
            Approval::AllowedOnce,
            &wider,
            "started background task bash-1",
            vec![Some(SandboxMode::WorkspaceWrite)],
        ),
        (
            false,
            Approval::Rejected,
            &wider,
            "Error: the user rejected escalating this command to \"workspace-write\"",
            vec![],
        ),
        (
            true,
            Approval::AllowedOnce,
            &wider,
            "Error: background tasks unavailable: 8 of 8 are running",
            vec![],
        ),
    ];
    for (full, approval, arguments, expected, modes) in rows {
        let starter = Arc::new(Starter {
            full,
            started: Mutex::default(),
        });
        let (tool, records) = tool(&world, Some(Says(Some(approval)))).await;
        let tool = tool.with_tasks(starter.clone());
        assert!(tool.offer().background);
        assert_eq!(text(&tool, &call, arguments).await, expected);
        let started = starter.started.lock().unwrap();
        let seen: Vec<_> = started
            .iter()
            .map(|request| request.sandbox_policy.as_ref().unwrap().mode)
            .collect();
        assert_eq!(seen, modes);
        assert!(started.iter().all(|request| request.background));
        assert!(
            !full || records.lock().unwrap().is_empty(),
            "nobody is asked for what cannot be started"
        );
    }
}

#[tokio::test]
async fn a_contributor_sets_its_variables_or_nothing_runs() {
    let world = World::new(users()[0]);
    let environment = EnvironmentRegistry::new(Some(&world.home()));
    let contributor = |name: &str, key: &str, value: Result<&'static str, &'static str>| {
        let owned = key.to_owned();
        Contributor {
            name: name.into(),
            keys: vec![(key.into(), "A test's".into())],
            resolve: Box::new(move |_| Ok([(owned.clone(), value?.to_owned())].into())),
        }
    };
    let composition = Composition {
        environment: environment.clone(),
        approver: None,
        record: Arc::new(|_| {}),
    };
    let tool = BashTool::new(Connection::connect(&world.socket()).await.unwrap(), composition);
    let call = call(world.workspace(), Some(SandboxMode::WorkspaceWrite));
    let command = arguments("touch made; echo $DSH_ONE.");
    let one = environment.register(contributor("one", "DSH_ONE", Ok("1"))).unwrap();
    assert_eq!(text(&tool, &call, &command).await, "1.\n");
    drop(one);
    assert_eq!(text(&tool, &call, &command).await, ".\n");
    std::fs::remove_file(world.workspace().join("made")).unwrap();
    for (value, message) in [
        (Err("no disk"), "Error: environment contributor \"two\" failed: no disk"),
        (
            Ok("a\0b"),
            "Error: environment contributor \"two\" returned a value with a NUL byte for DSH_ONE",
        ),
    ] {
        let _two = environment.register(contributor("two", "DSH_ONE", value)).unwrap();
        assert_eq!(text(&tool, &call, &command).await, message);
    }
    for key in ["DSH_", "DSH_A=B"] {
        let error = environment.register(contributor("three", key, Ok("1"))).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "environment contributor \"three\" declares {key}, which is not DSH_ and then letters, digits or underscores"
            )
        );
    }
    assert!(!world.workspace().join("made").exists());
}
