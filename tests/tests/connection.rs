//! The client for tokio against the real daemon: many commands on one connection, events, cancels, drops, and daemons that go away.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::pin::Pin;
use std::time::{Duration, Instant};

use dsh_client::ClientError;
use dsh_client::address::Endpoint;
use dsh_client::connection::{Connection, Event, Running};
use dsh_policy::wire::StreamName;
use dsh_policy::{BashExecRequest, ErrorCode, PolicyRequest, SandboxMode};
use dsh_tests::process::{marked, unique_mark, wait_until};
use dsh_tests::{World, users, world};
use futures_core::Stream;
use rustix::process::Signal;

/// The world of this process's own user: the daemon serves nobody else.
fn world() -> World {
    World::with_config(users()[0], "killGraceMs = 300\n")
}

async fn connect(world: &World) -> Connection {
    Connection::open(Endpoint::Socket(world.socket())).await.unwrap()
}

fn request(world: &World, command: &str) -> BashExecRequest {
    BashExecRequest {
        command: command.into(),
        sandbox_policy: Some(PolicyRequest {
            mode: Some(SandboxMode::WorkspaceWrite),
            workspace_root: Some(world.workspace().into()),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A command that can be found again, and its mark.
fn lasting(world: &World, command: &str) -> (BashExecRequest, String) {
    let mark = unique_mark("connection");
    let (name, value) = mark.split_once('=').unwrap();
    let mut request = request(world, command);
    request.env = Some([(name.into(), value.into())].into());
    (request, mark)
}

async fn all_events(running: &mut Running) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(event) = running.next_event().await {
        events.push(event);
    }
    events
}

/// Reads events until this one.
async fn until(running: &mut Running, wanted: impl Fn(&Event) -> bool) {
    loop {
        let event = running.next_event().await.expect("the command has not ended");
        if wanted(&event) {
            return;
        }
    }
}

fn is_output(event: &Event) -> bool {
    matches!(event, Event::Output { .. })
}

async fn gone(mark: &str) -> bool {
    let mark = mark.to_owned();
    tokio::task::spawn_blocking(move || wait_until(Duration::from_secs(5), || marked(&mark).is_empty()))
        .await
        .unwrap()
}

#[tokio::test]
async fn many_commands_run_at_once_and_each_gets_its_own_answer() {
    let world = world();
    let connection = connect(&world).await;
    let begun = Instant::now();
    let runs: Vec<_> = (0..24)
        .map(|n| {
            let connection = connection.clone();
            let request = request(&world, &format!("sleep 1; echo {n}; exit {n}"));
            tokio::spawn(async move { connection.run(request).await.unwrap() })
        })
        .collect();
    for (n, run) in runs.into_iter().enumerate() {
        let result = run.await.unwrap();
        assert_eq!(
            (result.stdout.text, result.exit_code),
            (format!("{n}\n"), Some(i32::try_from(n).unwrap()))
        );
    }
    assert!(
        begun.elapsed() < Duration::from_secs(12),
        "one after another takes 24 s: {:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn events_come_in_order_and_then_the_result() {
    let world = world();
    let connection = connect(&world).await;
    let command = format!("echo out; touch {}/x; exit 7", world.outside().display());
    let mut running = connection.start(request(&world, &command)).await.unwrap();
    let events = all_events(&mut running).await;
    let Event::Started { pid, spec } = &events[0] else {
        panic!("{events:?}")
    };
    assert!(*pid > 1 && spec.workdir == world.workspace().canonicalize().unwrap().into());
    let mut streams = [Vec::new(), Vec::new()];
    let mut facts = Vec::new();
    for event in &events[1..] {
        match event {
            Event::Output { stream, offset, data } => {
                let seen = &mut streams[usize::from(*stream == StreamName::Stderr)];
                assert_eq!(*offset, seen.len() as u64);
                seen.extend_from_slice(data.as_bytes());
            }
            Event::Denial(fact) => facts.push(fact.path.clone()),
            other => panic!("{other:?}"),
        }
    }
    let result = running.result().await.unwrap();
    assert_eq!(result.exit_code, Some(7));
    assert_eq!(facts, [Some(world.outside().join("x").into())]);
    assert_eq!(streams[0], b"out\n");
    assert_eq!(streams[1], result.stderr.text.as_bytes());
}

#[tokio::test]
async fn a_run_is_a_stream_of_its_events() {
    let world = world();
    let connection = connect(&world).await;
    let mut running = connection.start(request(&world, "echo a")).await.unwrap();
    let mut count = 0;
    while let Some(event) = std::future::poll_fn(|context| Pin::new(&mut running).poll_next(context)).await {
        count += usize::from(is_output(&event));
    }
    assert_eq!(count, 1);
    // It has ended for good, and the result is still there.
    assert_eq!(running.next_event().await, None);
    assert_eq!(running.result().await.unwrap().stdout.text, "a\n");
}

#[tokio::test]
async fn a_cancel_gives_a_result_with_what_was_written_before() {
    let world = world();
    let connection = connect(&world).await;
    let (request, mark) = lasting(&world, "echo early; sleep 1000");
    let mut running = connection.start(request).await.unwrap();
    until(&mut running, is_output).await;
    running.cancel();
    running.cancel();
    let result = running.result().await.unwrap();
    assert_eq!(
        (
            result.aborted,
            result.timed_out,
            result.signal.as_deref(),
            result.stdout.text.as_str()
        ),
        (true, false, Some("SIGTERM"), "early\n")
    );
    assert_eq!(marked(&mark), []);
}

#[tokio::test]
async fn a_handle_that_is_dropped_ends_its_command_and_no_other() {
    let world = world();
    let connection = connect(&world).await;
    let (request_kept, _) = lasting(&world, "sleep 2; echo kept");
    let kept = connection.start(request_kept).await.unwrap();
    let (request, mark) = lasting(&world, "echo up; sleep 1000");
    let mut dropped = connection.start(request).await.unwrap();
    until(&mut dropped, is_output).await;
    assert_eq!(marked(&mark).len(), 1, "it runs");
    drop(dropped);
    assert!(gone(&mark).await, "its command goes on");
    assert_eq!(kept.result().await.unwrap().stdout.text, "kept\n");
}

#[tokio::test]
async fn a_run_that_is_given_up_ends_its_command() {
    let world = world();
    let connection = connect(&world).await;
    let (request, mark) = lasting(&world, "touch up; sleep 1000");
    let given_up = tokio::time::timeout(Duration::from_secs(1), connection.run(request)).await;
    assert!(given_up.is_err());
    assert!(world.workspace().join("up").exists(), "it had started");
    assert!(gone(&mark).await);
    assert_eq!(
        connection
            .run(self::request(&world, "echo on"))
            .await
            .unwrap()
            .stdout
            .text,
        "on\n"
    );
}

#[tokio::test]
async fn the_connection_closes_with_its_last_user_and_not_before() {
    let world = world();
    let watcher = connect(&world).await;
    let connection = connect(&world).await;
    let running = connection.start(request(&world, "sleep 0.3; echo done")).await.unwrap();
    drop(connection);
    assert_eq!(running.result().await.unwrap().stdout.text, "done\n");
    let deadline = Instant::now() + Duration::from_secs(3);
    while watcher.status().await.unwrap().connections > 1 {
        assert!(Instant::now() < deadline, "the socket stays open");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn input_is_sent_while_the_command_runs() {
    let world = world();
    let connection = connect(&world).await;
    let input: Vec<u8> = (0..9_000_000_u32).map(|n| (n % 251) as u8).collect();
    let mut request = request(&world, "wc -c; echo end");
    request.stdin_open = true;
    let running = connection.start(request).await.unwrap();
    running.send_input(&input[..4_000_000]).await.unwrap();
    running.send_input(&input[4_000_000..]).await.unwrap();
    running.close_input().await.unwrap();
    assert_eq!(running.result().await.unwrap().stdout.text, "9000000\nend\n");
}

#[tokio::test]
async fn a_run_that_nobody_looks_at_neither_stops_the_others_nor_lies_about_gaps() {
    const TOTAL: usize = 60_000_000;
    let world = world();
    let connection = connect(&world).await;
    let command = format!("head -c {TOTAL} /dev/zero");
    let mut unread = connection.start(request(&world, &command)).await.unwrap();
    let again = connection.run(request(&world, &command)).await.unwrap();
    assert_eq!(again.stdout.bytes, TOTAL as u64);
    // All of it passes by before anybody looks: messages come in the order in which they were sent.
    while connection.status().await.unwrap().running > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    connection.status().await.unwrap();
    for n in 0..5 {
        let result = connection.run(request(&world, &format!("echo {n}"))).await.unwrap();
        assert_eq!(result.stdout.text, format!("{n}\n"));
    }
    let (mut next, mut seen, mut missed) = (0, 0, 0);
    while let Some(event) = unread.next_event().await {
        if let Event::Output { offset, data, .. } = event {
            assert!(offset >= next, "never backwards");
            missed += offset - next;
            next = offset + data.0.len() as u64;
            seen += data.0.len() as u64;
        }
    }
    let result = unread.result().await.unwrap();
    missed += result.stdout.bytes - next;
    assert_eq!((result.stdout.bytes, seen + missed), (TOTAL as u64, TOTAL as u64));
    assert!(seen > 0 && seen <= 8 * 1024 * 1024, "what waits is bounded: {seen}");
    let spill = result.stdout.spill_path.expect("the whole is in a file");
    assert_eq!(std::fs::metadata(spill.as_path()).unwrap().len(), TOTAL as u64);
}

#[tokio::test]
async fn questions_are_answered_while_commands_run() {
    let world = World::with_config(users()[0], "keptBytes = 1234\n");
    let connection = connect(&world).await;
    assert_eq!(connection.greeting().pid, world.daemon_pid());
    let running = connection.start(request(&world, "sleep 1000")).await.unwrap();
    let probe = connection.probe().await.unwrap();
    let status = connection.status().await.unwrap();
    assert_eq!(
        (status.pid, status.running, status.tier),
        (world.daemon_pid(), 1, world::tier().or(probe.best_tier()))
    );
    let (toml, path) = connection.config().await.unwrap();
    assert!(toml.contains("keptBytes = 1234"));
    assert_eq!(path.to_path_buf(), world.config_file());
    let spec = connection.resolve(request(&world, "true")).await.unwrap();
    assert_eq!((spec.stdout_max_bytes, spec.timeout_ms), (1234, 120_000));
    drop(running);
}

#[tokio::test]
async fn a_refused_request_is_an_error_of_its_own_and_the_connection_stays() {
    let world = world();
    let connection = connect(&world).await;
    for outcome in [
        connection.run(request(&world, "  ")).await.map(drop),
        connection.resolve(request(&world, "  ")).await.map(drop),
    ] {
        let Err(ClientError::Exec(error)) = outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(
            (error.code, error.message.as_str()),
            (
                ErrorCode::InvalidRequest,
                "invalid command: expected a non-empty string"
            )
        );
    }
    assert_eq!(
        connection.run(request(&world, "exit 4")).await.unwrap().exit_code,
        Some(4)
    );
}

#[tokio::test]
async fn a_daemon_that_dies_is_told_to_everybody_who_waits_and_to_those_who_come_later() {
    let mut world = world();
    let connection = connect(&world).await;
    let mut running = connection.start(request(&world, "echo up; sleep 1000")).await.unwrap();
    until(&mut running, is_output).await;
    world.signal_daemon(Signal::KILL);
    let outcome = tokio::time::timeout(Duration::from_secs(5), running.result())
        .await
        .unwrap();
    assert!(matches!(outcome, Err(ClientError::Lost)), "{outcome:?}");
    assert_eq!(outcome.unwrap_err().into_exec_error().code, ErrorCode::Unknown);
    world.wait_for_daemon();
    assert!(matches!(connection.status().await, Err(ClientError::Lost)));
    assert!(matches!(
        connection.run(request(&world, "true")).await,
        Err(ClientError::Lost)
    ));
    let nobody = Connection::connect(&world.socket()).await;
    assert!(matches!(nobody, Err(ClientError::Unreachable(_))), "{nobody:?}");
}

#[tokio::test]
async fn a_daemon_that_leaves_delivers_results_first() {
    let mut world = world();
    let connection = connect(&world).await;
    let mut running = connection
        .start(request(&world, "echo early; sleep 1000"))
        .await
        .unwrap();
    until(&mut running, is_output).await;
    world.signal_daemon(Signal::TERM);
    let result = running.result().await.unwrap();
    assert_eq!((result.aborted, result.stdout.text.as_str()), (true, "early\n"));
    drop(connection);
    assert!(world.wait_for_daemon().success());
}

#[tokio::test]
async fn input_that_is_not_read_holds_up_nothing_else() {
    let world = world();
    let connection = connect(&world).await;
    let (lasting, mark) = lasting(&world, "sleep 1000");
    let running = connection
        .start(BashExecRequest {
            stdin_open: true,
            ..lasting
        })
        .await
        .unwrap();
    let input = vec![b'x'; 8 * 1024 * 1024];
    let sending = async {
        let sent = tokio::time::timeout(Duration::from_millis(300), running.send_input(&input)).await;
        assert!(
            sent.is_err(),
            "eight megabytes are more than a command that reads nothing can be sent"
        );
    };
    let other = async { connection.run(request(&world, "echo other")).await.unwrap() };
    let ((), other) = tokio::join!(sending, other);
    assert_eq!(other.stdout.text, "other\n");
    running.cancel();
    let begun = Instant::now();
    assert!(running.result().await.unwrap().aborted);
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert!(gone(&mark).await);
}

#[tokio::test]
async fn much_input_arrives_whole_and_none_is_waited_for_when_nobody_reads() {
    let world = world();
    let connection = connect(&world).await;
    let input = vec![b'x'; 20 * 1024 * 1024];
    for (command, expected) in [
        ("wc -c", "20971520\n"),
        ("head -c 3", "xxx"),
        ("exec < /dev/null; sleep 0.5; echo closed", "closed\n"),
    ] {
        let request = BashExecRequest {
            stdin_open: true,
            ..request(&world, command)
        };
        let running = connection.start(request).await.unwrap();
        running.send_input(&input).await.unwrap();
        running.close_input().await.unwrap();
        assert_eq!(running.result().await.unwrap().stdout.text, expected, "{command}");
    }
}
