//! What a command finds in its environment, and what never reaches it, the disk or the log.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

use dsh_policy::SandboxMode::{self, ReadOnly};
use dsh_policy::error::{ErrorCode, ExecError};
use dsh_policy::wire::{ClientMessage, Encoding, ServerMessage};
use dsh_tests::wire::{Peer, request};
use dsh_tests::{Ran, World, users};

/// Names and values that must not get through, each with a value of its own to look for afterwards.
const SECRETS: &[(&str, &str)] = &[
    ("X_TOKEN", "value-one-for-grep"),
    ("my_api_key", "value-two-for-grep"),
    ("PGPASSWORD", "value-three-for-grep"),
    ("Client_Secret", "value-four-for-grep"),
    ("GPG_PASSPHRASE", "value-five-for-grep"),
    ("DATABASE_URL", "postgres://user:value-six-for-grep@db.example/x"),
    ("https_proxy", "http://user:value-seven-for-grep@proxy.example:3128"),
    (
        "INNOCENT",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nvalue-eight-for-grep\n-----END OPENSSH PRIVATE KEY-----",
    ),
    ("BUILD_ID", "ghp_0123456789abcdefghijABCDEFGHIJ012345"),
    ("REGION_ID", "AKIAIOSFODNN7EXAMPLE"),
    ("SSH_AUTH_SOCK", "/tmp/value-nine-for-grep"),
    ("KUBECONFIG", "/home/value-ten-for-grep"),
    ("NETRC", "/home/value-eleven-for-grep"),
    ("BASH_ENV", "/home/value-twelve-for-grep"),
    ("ENV", "/home/value-thirteen-for-grep"),
    ("PROMPT_COMMAND", "echo value-fourteen-for-grep"),
    ("BASH_FUNC_ls%%", "() { echo value-fifteen-for-grep; }"),
    ("LD_PRELOAD", "/lib/value-sixteen-for-grep.so"),
    ("GIT_CONFIG_PARAMETERS", "'user.name=value-zero-for-grep'"),
    ("GIT_ASKPASS", "/bin/value-seventeen-for-grep"),
    ("DSH_OUTER", "value-eighteen-for-grep"),
    ("dsh_lower", "value-nineteen-for-grep"),
];
/// What tools need.
const KEPT: &[(&str, &str)] = &[
    ("LANG", "C.UTF-8"),
    ("EDITOR", "vi"),
    ("CARGO_HOME", "/somewhere/cargo"),
    ("VALUE_WITH_NEWLINE", "a\nb"),
    ("GIT_AUTHOR_NAME", "Some Body"),
    ("http_proxy", "http://proxy.example:3128"),
    ("REPOSITORY", "https://example.org/x.git"),
];

/// `env -0` of a command, as a map of bytes.
fn environment_of(ran: &Ran) -> BTreeMap<String, String> {
    let text = ran.result().stdout.text;
    text.split('\0')
        .filter_map(|entry| entry.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn with_ambient(world: &World, mode: SandboxMode, ambient: &[(&str, &str)], options: &[&str], command: &str) -> Ran {
    let options: Vec<&OsStr> = options.iter().map(OsStr::new).collect();
    Ran::of(
        world
            .json_command(mode, &options, command)
            .envs(ambient.iter().copied())
            .output()
            .unwrap(),
    )
}

#[test]
fn secrets_hooks_and_outer_identities_do_not_reach_the_command() {
    for user in users() {
        let world = World::new(user);
        let ambient = [SECRETS, KEPT].concat();
        for mode in SandboxMode::ALL {
            let ran = with_ambient(&world, *mode, &ambient, &[], "env -0");
            let environment = environment_of(&ran);
            let removed: Vec<String> = ran
                .result()
                .environment
                .removed
                .iter()
                .map(|name| name.display())
                .collect();
            for (name, value) in SECRETS {
                assert!(!environment.contains_key(*name), "{user:?} {mode} {name} got through");
                assert!(
                    !environment.values().any(|found| found.contains(value)),
                    "{name}'s value got through"
                );
                assert!(
                    removed.contains(&(*name).to_owned()),
                    "{name} is not listed as removed: {removed:?}"
                );
            }
            for (name, value) in KEPT {
                assert_eq!(
                    environment.get(*name).map(String::as_str),
                    Some(*value),
                    "{user:?} {mode} {name}"
                );
            }
            for (name, value) in [
                ("NO_COLOR", "1"),
                ("TERM", "dumb"),
                ("PAGER", "cat"),
                ("GIT_PAGER", "cat"),
            ] {
                assert_eq!(environment.get(name).map(String::as_str), Some(value), "{mode} {name}");
            }
            let whole = String::from_utf8_lossy(&ran.stdout).into_owned();
            assert!(!whole.contains("-for-grep"), "a value is in the result");
        }
    }
}

#[test]
fn deliberate_values_win_and_managed_ones_win_last() {
    for user in users() {
        let world = World::new(user);
        let options = [
            "--env",
            "MY_TOKEN=deliberate",
            "--env",
            "TERM=xterm",
            "--env",
            "EMPTY=",
            "--dsh-env",
            "DSH_SESSION_ID=s-1",
        ];
        let ran = with_ambient(
            &world,
            ReadOnly,
            &[("MY_TOKEN", "ambient"), ("DSH_SESSION_ID", "outer")],
            &options,
            "env -0",
        );
        let environment = environment_of(&ran);
        for (name, value) in [
            ("MY_TOKEN", "deliberate"),
            ("TERM", "xterm"),
            ("EMPTY", ""),
            ("DSH_SESSION_ID", "s-1"),
        ] {
            assert_eq!(environment.get(name).map(String::as_str), Some(value), "{name}");
        }
    }
}

#[test]
fn no_value_is_on_disk_or_in_the_log_afterwards() {
    for user in users() {
        let world = World::with_config(user, "logLevel = \"trace\"\n");
        let options = [
            "--env",
            "DELIBERATE=value-twenty-for-grep",
            "--dsh-env",
            "DSH_X=value-twentyone-for-grep",
        ];
        // More output than is kept, so that there is a spill file too.
        let command =
            "seq 100000; echo value-of-the-command-for-grep > /dev/null; echo x > /var/tmp/dsh-refused; false";
        let ran = with_ambient(&world, ReadOnly, SECRETS, &options, command);
        assert!(ran.result().stdout.spill_path.is_some());
        assert_nowhere(world.folder(), &["-for-grep", "ghp_0123456789", "AKIAIOSFODNN7"]);
    }
}

/// Searches every file of the world except the binaries (which have no business with it) for any of `needles`.
fn assert_nowhere(folder: &Path, needles: &[&str]) {
    let mut seen = 0;
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !path.ends_with("bin") {
                    folders.push(path);
                }
            } else if path.is_file() {
                seen += 1;
                let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
                for needle in needles {
                    assert!(!text.contains(needle), "{} has {needle}", path.display());
                }
            }
        }
    }
    assert!(seen >= 3, "the log, the configuration and a spill file at least");
}

#[test]
fn the_daemon_s_own_environment_cannot_be_read_from_a_command() {
    for user in users() {
        let world = World::new(user);
        let read = format!("cat /proc/{}/environ", world.daemon_pid());
        let unconfined = world.run(SandboxMode::DangerFullAccess, &read);
        assert_ne!(unconfined.result().stdout.bytes, 0, "the daemon has an environment");
        let ran = world.run(ReadOnly, &read);
        assert_eq!(
            (ran.result().stdout.bytes, ran.result().exit_code),
            (0, Some(1)),
            "{user:?}"
        );
        let helper = world.run(ReadOnly, "cat /proc/$PPID/environ 2> /dev/null | wc -c");
        assert_eq!(helper.text(), "0", "the helper has no environment");
    }
}

#[test]
fn names_that_cannot_be_set_are_refused_with_the_name() {
    let world = World::new(dsh_tests::User::Ordinary);
    for (options, word) in [
        (["--env", "DSH_X=1"], "DSH_X"),
        (["--env", "dsh_x=1"], "dsh_x"),
        (["--dsh-env", "OTHER=1"], "OTHER"),
    ] {
        let ran = with_ambient(&world, ReadOnly, &[], &options, "touch ran");
        assert_eq!(ran.code(), 125, "{options:?} {ran:?}");
        assert!(ran.stderr.contains(word), "{:?}", ran.stderr);
        assert!(ran.stdout.is_empty());
    }
}

/// Values are bytes.
#[test]
fn bytes_that_are_no_text_pass_through() {
    use std::os::unix::ffi::OsStrExt;
    for user in users() {
        let world = World::new(user);
        let options = [OsStr::new("--env"), OsStr::from_bytes(b"ODD=\xff\xfe")];
        let ran = world.run_with(ReadOnly, &options, "printf %s \"$ODD\" | od -An -tx1");
        assert_eq!(ran.text().trim(), "ff fe");
        let ambient = Ran::of(
            world
                .json_command(ReadOnly, &[], "printf %s \"$OTHER\" | od -An -tx1")
                .env("OTHER", OsStr::from_bytes(b"\x80"))
                .output()
                .unwrap(),
        );
        assert_eq!(ambient.text().trim(), "80");
    }
}

#[test]
fn the_deployment_s_own_rules_hold_for_what_the_client_sends() {
    let config = "environmentKeep = [\"MY_API_KEY\"]\nenvironmentRemove = [\"internal\"]\n";
    for user in users() {
        let world = World::with_config(user, config);
        let ambient = [
            ("MY_API_KEY", "kept"),
            ("OTHER_API_KEY", "gone"),
            ("COMPANY_INTERNAL_URL", "gone"),
        ];
        let ran = with_ambient(&world, SandboxMode::ReadOnly, &ambient, &[], "env -0");
        let environment = environment_of(&ran);
        assert_eq!(
            environment.get("MY_API_KEY").map(String::as_str),
            Some("kept"),
            "{user:?}"
        );
        let removed: Vec<String> = ran
            .result()
            .environment
            .removed
            .iter()
            .map(|name| name.display())
            .collect();
        assert_eq!(removed, ["COMPANY_INTERNAL_URL", "OTHER_API_KEY"], "{user:?}");
        assert!(removed.iter().all(|name| !environment.contains_key(name)), "{user:?}");
    }
}

/// What the daemon answers to a command with this environment, not counting what it adds itself.
fn answer(world: &World, env: BTreeMap<dsh_policy::ByteString, dsh_policy::ByteString>) -> Result<i32, ExecError> {
    let mut asked = request("exit 3");
    asked.ambient_env = Some(BTreeMap::new());
    asked.env = Some(env);
    let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
    peer.send(&ClientMessage::Run {
        id: 1,
        request: Box::new(asked),
        stream: false,
    });
    match peer.last_answer(1) {
        ServerMessage::Finished { result, .. } => Ok(result.exit_code.expect("no signal")),
        ServerMessage::Error { error, .. } => Err(error),
        other => panic!("{other:?}"),
    }
}

/// A NUL byte and a pointer.
const PER_ENTRY: usize = 1 + size_of::<usize>();

/// Whether the kernel agrees is seen on both sides of the limit.
#[test]
fn more_than_the_kernel_passes_to_a_program_is_told_with_the_sizes_and_the_limit() {
    let world = World::new(users()[0]);
    let stack = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    let limit = (stack.unwrap_or(u64::MAX) / 4).clamp(128 << 10, 6 << 20);
    let entry = 100_000;
    let fitting = usize::try_from(limit).unwrap() / entry - 1;
    let env = |count: usize| {
        (0..count)
            .map(|n| (format!("PART_{n:03}").into(), "x".repeat(entry).into()))
            .collect()
    };

    assert_eq!(answer(&world, env(fitting)), Ok(3));

    let error = answer(&world, env(fitting + 2)).unwrap_err();
    assert_eq!(error.code, ErrorCode::LimitExceeded);
    // What the executor adds to the parts.
    let parts = (fitting + 2) * ("PART_000=".len() + entry + PER_ENTRY);
    let added: usize = ["NO_COLOR=1", "TERM=dumb", "PAGER=cat", "GIT_PAGER=cat", "PWD=/"]
        .map(|pair| pair.len() + PER_ENTRY)
        .iter()
        .sum();
    let expected = format!(
        "the command (6 bytes) and its environment ({} entries, {} bytes as the kernel counts) are more than the {limit} bytes \
         that the kernel passes to a program; pass large values by standard input or in a file",
        fitting + 2 + 5,
        parts + added,
    );
    assert_eq!(error.message, expected);
}

#[test]
fn a_name_that_is_no_text_is_written_as_base64_in_json() {
    let world = World::new(users()[0]);
    let mut peer = Peer::hello(&world.socket(), Encoding::Json);
    let json = r#"{"type":"run","id":1,"stream":false,"request":{"command":"env -0 | grep -za '^ODD' | od -An -tx1","env":{"base64:T0RE/w==":"v"}}}"#;
    peer.raw(&dsh_policy::frame::encode(json.as_bytes()).unwrap());
    match peer.last_answer(1) {
        ServerMessage::Finished { result, .. } => assert_eq!(result.stdout.text.trim(), "4f 44 44 ff 3d 76 00"),
        other => panic!("{other:?}"),
    }
}
