//! The socket as a hostile or clumsy peer uses it: bounds, versions, garbage, floods; and what is promised to every language.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use dsh_policy::error::ErrorCode;
use dsh_policy::frame;
use dsh_policy::wire::{ClientMessage, Encoding, PROTOCOL, ProtocolVersion, ServerMessage, StreamName};
use dsh_tests::wire::{Peer, request};
use dsh_tests::{User, World, users};

/// After whatever a peer did, the daemon serves the next one.
#[track_caller]
fn assert_serves(world: &World) {
    for encoding in [Encoding::Json, Encoding::Bincode] {
        assert_eq!(
            Peer::hello(&world.socket(), encoding).output_of(1, "echo fine"),
            "fine\n"
        );
    }
}

fn own_world() -> World {
    World::new(users()[0])
}

#[test]
fn the_socket_and_its_folder_belong_to_the_user_alone() {
    for user in users() {
        let world = World::new(user);
        let socket = std::fs::metadata(world.socket()).unwrap();
        let folder = std::fs::metadata(world.socket().parent().unwrap()).unwrap();
        assert_eq!((socket.mode() & 0o7777, socket.uid()), (0o600, user.id()));
        assert_eq!((folder.mode() & 0o7777, folder.uid()), (0o700, user.id()));
    }
}

#[test]
fn another_user_is_refused_even_root() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("left out: acting as two users needs root");
        return;
    }
    let world = World::new(User::Ordinary);
    let mut peer = Peer::connect(&world.socket());
    // Root passes every file permission; the daemon asks the kernel who is there.
    if let Some(reply) = peer.greet(PROTOCOL, Encoding::Json) {
        assert!(reply.error.is_some(), "{reply:?}");
    }
    peer.run(1, "echo through");
    assert!(peer.is_closed_by_daemon());
    let world = World::new(User::Root);
    let mut command = std::process::Command::new(world.binary("dsh-exec"));
    User::Ordinary.apply(&mut command);
    let output = command
        .args(["run", "--socket"])
        .arg(world.socket())
        .args(["--", "echo through"])
        .output()
        .unwrap();
    assert_eq!((output.status.code(), output.stdout), (Some(125), vec![]));
}

#[test]
fn another_major_version_is_refused_with_both_and_a_newer_minor_one_is_served() {
    let world = own_world();
    let mut peer = Peer::connect(&world.socket());
    let theirs = ProtocolVersion {
        major: PROTOCOL.major + 1,
        minor: 3,
    };
    let error = peer.greet(theirs, Encoding::Json).unwrap().error.expect("a refusal");
    assert_eq!(error.code, ErrorCode::ProtocolMismatch);
    assert!(
        error.message.contains(&theirs.to_string()) && error.message.contains(&PROTOCOL.to_string()),
        "{error}"
    );
    assert!(peer.is_closed_by_daemon());
    let mut peer = Peer::connect(&world.socket());
    let newer = ProtocolVersion {
        major: PROTOCOL.major,
        minor: PROTOCOL.minor + 9,
    };
    assert_eq!(peer.greet(newer, Encoding::Json).unwrap().error, None);
    assert_eq!(peer.output_of(1, "echo x"), "x\n");
}

#[test]
fn bytes_that_are_no_hello_end_the_connection_and_nothing_else() {
    let world = own_world();
    let long = vec![b'x'; 70_000];
    let rows: &[(&str, Vec<u8>)] = &[
        ("garbage", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("largest length", vec![0xff; 8]),
        ("over the hello's limit", frame::encode(&long).unwrap()),
        ("not JSON", frame::encode(b"\xff\xfe").unwrap()),
        ("another JSON", frame::encode(b"[1,2,3]").unwrap()),
        ("empty frame", frame::encode(b"").unwrap()),
        (
            "unknown encoding",
            frame::encode(br#"{"protocol":{"major":1,"minor":0},"encoding":"xml"}"#).unwrap(),
        ),
        ("deep nesting", frame::encode("[".repeat(60_000).as_bytes()).unwrap()),
    ];
    for (name, bytes) in rows {
        let mut peer = Peer::connect(&world.socket());
        peer.raw(bytes);
        assert!(peer.is_closed_by_daemon(), "{name}");
        assert_serves(&world);
    }
}

#[test]
fn a_peer_that_says_nothing_or_dribbles_is_dropped() {
    let world = own_world();
    for dribble in [false, true] {
        let mut peer = Peer::connect(&world.socket());
        peer.stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let begun = Instant::now();
        let mut closed = false;
        while !closed && begun.elapsed() < Duration::from_secs(8) {
            if dribble {
                peer.raw(&[0]);
            }
            let mut byte = [0];
            closed = match std::io::Read::read(&mut peer.stream, &mut byte) {
                Ok(count) => count == 0,
                Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
            };
        }
        assert!(closed, "still open after {:?} (dribble {dribble})", begun.elapsed());
    }
    assert_serves(&world);
}

#[test]
fn a_frame_after_the_hello_is_bounded_and_checked() {
    let world = own_world();
    for encoding in [Encoding::Json, Encoding::Bincode] {
        let mut trailing = encoding.frame(&ClientMessage::Status { id: 1 }).unwrap();
        trailing[0] += 1;
        trailing.push(b'x');
        let rows: &[(&str, Vec<u8>)] = &[
            (
                "a length over the limit",
                u32::try_from(frame::FRAME_LIMIT + 1).unwrap().to_le_bytes().to_vec(),
            ),
            (
                "garbage",
                frame::encode(&[0xfd, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).unwrap(),
            ),
            ("left-over bytes", trailing),
            ("an empty frame", frame::encode(b"").unwrap()),
        ];
        for (name, bytes) in rows {
            let mut peer = Peer::hello(&world.socket(), encoding);
            peer.raw(bytes);
            let answer = peer.message();
            match answer {
                None => {}
                Some(ServerMessage::Error { id: None, ref error }) => {
                    assert!(!error.message.is_empty(), "{name}");
                    assert!(peer.is_closed_by_daemon(), "{encoding} {name}");
                }
                other => panic!("{encoding} {name}: {other:?}"),
            }
            assert_serves(&world);
        }
        // A frame that is cut off by the peer's end.
        let mut peer = Peer::hello(&world.socket(), encoding);
        peer.raw(&[200, 0, 0, 0, 1, 2, 3]);
        drop(peer);
        assert_serves(&world);
    }
}

#[test]
fn a_kind_of_a_newer_client_is_ignored() {
    let world = own_world();
    let mut peer = Peer::hello(&world.socket(), Encoding::Json);
    peer.raw(&frame::encode(br#"{"type":"teleport","id":9,"where":"home"}"#).unwrap());
    peer.raw(
        &frame::encode(
            br#"{"type":"run","id":10,"stream":false,"newField":[1],"request":{"command":"echo known","newer":{}}}"#,
        )
        .unwrap(),
    );
    match peer.last_answer(10) {
        ServerMessage::Finished { result, .. } => assert_eq!(result.stdout.text, "known\n"),
        other => panic!("{other:?}"),
    }
    let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
    peer.raw(&frame::encode(&[120, 1, 2, 3]).unwrap());
    assert_eq!(peer.output_of(1, "echo known"), "known\n");
}

#[test]
fn an_id_in_use_is_refused_and_the_first_request_is_not_disturbed() {
    let world = own_world();
    let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
    peer.run(7, "sleep 0.3; echo first");
    peer.run(7, "echo second");
    let mut errors = 0;
    let mut outputs = Vec::new();
    while outputs.is_empty() || errors == 0 {
        match peer.message().expect("the connection stays") {
            ServerMessage::Error { error, .. } => {
                assert_eq!(error.code, ErrorCode::InvalidRequest);
                errors += 1;
            }
            ServerMessage::Finished { id: 7, result } => outputs.push(result.stdout.text),
            _ => {}
        }
    }
    assert_eq!((errors, outputs), (1, vec!["first\n".to_owned()]));
}

#[test]
fn many_requests_at_once_on_one_connection_answer_each_to_its_own_id() {
    let world = own_world();
    for encoding in [Encoding::Json, Encoding::Bincode] {
        let mut peer = Peer::hello(&world.socket(), encoding);
        for id in 0..60 {
            peer.run(id, &format!("sleep 0.0{}; echo {id}", id % 7));
        }
        let mut answers = BTreeMap::new();
        while answers.len() < 60 {
            match peer.message().unwrap() {
                ServerMessage::Finished { id, result } => {
                    assert_eq!(result.stdout.text, format!("{id}\n"));
                    assert!(answers.insert(id, ()).is_none(), "{id} answered twice");
                }
                ServerMessage::Error { id, error } => panic!("{id:?} {error}"),
                _ => {}
            }
        }
    }
}

#[test]
fn events_come_in_order_and_cover_the_whole_stream() {
    let world = own_world();
    let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
    let run = ClientMessage::Run {
        id: 1,
        request: Box::new(request("seq 20000; echo err >&2; echo x > /var/tmp/dsh-refused")),
        stream: true,
    };
    peer.send(&run);
    let (mut started, mut denials, mut out, mut err) = (0, 0, Vec::new(), Vec::new());
    loop {
        match peer.message().unwrap() {
            ServerMessage::Started { pid, spec, .. } => {
                assert!(pid > 1 && out.is_empty() && spec.timeout_ms == 120_000 && spec.stdout_max_bytes == 64_000);
                started += 1;
            }
            ServerMessage::Output {
                stream, offset, data, ..
            } => {
                let all = if stream == StreamName::Stdout {
                    &mut out
                } else {
                    &mut err
                };
                assert_eq!(offset as usize, all.len(), "a reader that keeps up misses nothing");
                all.extend_from_slice(data.as_bytes());
            }
            ServerMessage::Denial { fact, .. } => {
                assert_eq!(fact.path.unwrap().display(), "/var/tmp/dsh-refused");
                denials += 1;
            }
            ServerMessage::Finished { result, .. } => {
                assert_eq!(result.stdout.bytes, out.len() as u64);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    let expected: String = (1..=20_000).map(|n| format!("{n}\n")).collect();
    assert_eq!((started, denials), (1, 1));
    assert!(out == expected.as_bytes());
    assert!(err.starts_with(b"err\n"));
}

#[test]
fn a_cancel_ends_the_command_and_is_a_result() {
    let world = own_world();
    let mut peer = Peer::hello(&world.socket(), Encoding::Json);
    peer.run(1, "echo early; sleep 1000");
    while !matches!(peer.message().unwrap(), ServerMessage::Started { .. }) {}
    std::thread::sleep(Duration::from_millis(200));
    peer.send(&ClientMessage::Cancel { id: 1 });
    peer.send(&ClientMessage::Cancel { id: 1 });
    peer.send(&ClientMessage::Cancel { id: 99 });
    match peer.last_answer(1) {
        ServerMessage::Finished { result, .. } => {
            assert_eq!((result.aborted, result.timed_out, result.survivors), (true, false, 0));
            assert_eq!(
                (result.stdout.text.as_str(), result.signal.as_deref()),
                ("early\n", Some("SIGTERM"))
            );
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(peer.output_of(2, "echo next"), "next\n");
}

#[test]
fn input_can_be_sent_while_the_command_runs() {
    let world = own_world();
    for encoding in [Encoding::Json, Encoding::Bincode] {
        let mut peer = Peer::hello(&world.socket(), encoding);
        let mut asked = request("cat; echo end");
        asked.stdin_open = true;
        peer.send(&ClientMessage::Run {
            id: 1,
            request: Box::new(asked),
            stream: false,
        });
        for part in ["one ", "two ", "three\n"] {
            peer.send(&ClientMessage::Stdin {
                id: 1,
                data: part.into(),
                eof: false,
            });
        }
        peer.send(&ClientMessage::Stdin {
            id: 1,
            data: "".into(),
            eof: true,
        });
        match peer.last_answer(1) {
            ServerMessage::Finished { result, .. } => assert_eq!(result.stdout.text, "one two three\nend\n"),
            other => panic!("{other:?}"),
        }
    }
}

/// One client floods and never reads; others are served as if it were not there.
#[test]
fn a_reader_that_never_reads_holds_up_nobody() {
    let world = own_world();
    let mut deaf = Peer::hello(&world.socket(), Encoding::Bincode);
    let run = ClientMessage::Run {
        id: 1,
        request: Box::new(request("head -c 50000000 /dev/zero; true")),
        stream: true,
    };
    deaf.send(&run);
    std::thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    assert_serves(&world);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    // Late but not lost: the result is exact.
    match deaf.last_answer(1) {
        ServerMessage::Finished { result, .. } => assert_eq!(result.stdout.bytes, 50_000_000),
        other => panic!("{other:?}"),
    }
}

#[test]
fn thousands_of_frames_and_connections_are_served_or_refused_in_words() {
    let world = own_world();
    let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
    for id in 0..5_000 {
        peer.send(&ClientMessage::Cancel { id });
    }
    for id in 0..2_000 {
        peer.send(&ClientMessage::Status { id });
        match peer.message() {
            Some(ServerMessage::Status { id: answered, .. }) => assert_eq!(answered, id),
            other => panic!("{other:?}"),
        }
    }
    drop(peer);
    let idle: Vec<_> = (0..300).map(|_| Peer::connect(&world.socket())).collect();
    assert_serves(&world);
    drop(idle);
    assert_serves(&world);
}

#[test]
fn background_work_is_started_and_not_run() {
    let world = own_world();
    let mut peer = Peer::hello(&world.socket(), Encoding::Json);
    let mut asked = request("echo x");
    asked.background = true;
    peer.send(&ClientMessage::Run {
        id: 1,
        request: Box::new(asked),
        stream: false,
    });
    match peer.last_answer(1) {
        ServerMessage::Error { error, .. } => {
            assert_eq!(
                error.message,
                "a background command is started with the message `start`, not `run`"
            )
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_client_of_another_build_is_spoken_to_in_json() {
    let world = own_world();
    for build in ["", "0123456789abcdef"] {
        let mut peer = Peer::connect(&world.socket());
        let reply = peer.greet_as(PROTOCOL, Encoding::Bincode, build).unwrap();
        assert_eq!((reply.error, reply.encoding), (None, Encoding::Json));
        assert_eq!(peer.output_of(1, "echo understood"), "understood\n");
    }
    let mut peer = Peer::connect(&world.socket());
    assert_eq!(
        peer.greet(PROTOCOL, Encoding::Bincode).unwrap().encoding,
        Encoding::Bincode
    );
}
