//! What a confined command is: without powers, without a way to get some, with three descriptors and no terminal. In itself and where namespaces are not
//! permitted it works likewise.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt as _;

use dsh_policy::SandboxMode::{ReadOnly, WorkspaceWrite};
use dsh_policy::denial::Operation::{ChangeMode, ConnectUnix, CreateFile};
use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{Ran, User, World, users};

/// Told of the shell itself: capability sets, `no_new_privs`, filter, session and terminal, descriptors. Then what a terminal says.
const SELF: &str = r#"grep -E '^(Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp):' /proc/$$/status | tr -d '\t'
read -r pid name state parent group session terminal rest < /proc/$$/stat; echo $((pid == session)) $terminal
for ((fd = 0; fd < 1024; fd++)); do [ -e /proc/$$/fd/$fd ] && open="$open $fd"; done; echo $open
(: < /dev/tty) 2>&1 | sed 's/.*: //'"#;

#[test]
fn a_confined_command_has_no_powers_three_descriptors_and_no_terminal() {
    for user in users() {
        let world = World::new(user);
        for mode in [ReadOnly, WorkspaceWrite] {
            // The first is a child that was prepared beforehand, the second is forked for its command: another filter.
            for network in ["full", "none"] {
                let ran = world.run_with(mode, &["--network", network].map(OsStr::new), SELF);
                let text = ran.text();
                let lines: Vec<_> = text.lines().collect();
                let zero = "0000000000000000";
                // Only who may change the bounding set can empty it; without `no_new_privs` it would be what a set-uid program could get.
                let bounding = if user == User::Root {
                    format!("CapBnd:{zero}")
                } else {
                    lines[3].to_owned()
                };
                let expected = [
                    format!("CapInh:{zero}"),
                    format!("CapPrm:{zero}"),
                    format!("CapEff:{zero}"),
                    bounding,
                    format!("CapAmb:{zero}"),
                    "NoNewPrivs:1".to_owned(),
                    "Seccomp:2".to_owned(),
                    "1 0".to_owned(),
                    "0 1 2".to_owned(),
                    "No such device or address".to_owned(),
                ];
                assert_eq!(lines, expected, "{user:?} {mode} {network}");
                assert_eq!(ran.facts(), [], "{user:?} {mode} {network}");
                for (probe, answer) in [
                    ("tiocsti-0", "ENOTTY"),
                    ("capset-all", "EPERM"),
                    ("mount-tmpfs /mnt", "EPERM"),
                ] {
                    let words: Vec<_> = probe.split(' ').map(str::to_owned).collect();
                    assert_eq!(world.run(mode, world.probe(&words)).text(), answer, "{user:?} {probe}");
                }
            }
        }
    }
}

/// Runs `dsh-exec` inside a command, with a runtime folder of its own when there is one.
fn nested(world: &World, own_folder: bool) -> Ran {
    let inner = format!(
        "'{}' run --json --mode workspace-write --workspace . 'echo in; touch {}/made; echo x > here'",
        world.binary("dsh-exec").display(),
        world.outside().display()
    );
    let folders = "mkdir -m 700 run state; export XDG_RUNTIME_DIR=$PWD/run XDG_STATE_HOME=$PWD/state; ";
    world.run(
        WorkspaceWrite,
        format!("{}{inner}", if own_folder { folders } else { "" }),
    )
}

#[test]
fn a_command_can_run_confined_commands_and_both_layers_hold() {
    for user in users() {
        let world = World::new(user);
        let ran = nested(&world, true);
        let inner: dsh_policy::BashRunResult =
            serde_json::from_str(&ran.text()).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
        assert_eq!(inner.stdout.text, "in\n");
        let confined = inner.sandbox.confined.unwrap();
        // The kernel permits one listener; the inner layer says so, and the outer one sees what the inner one refuses.
        assert!(
            !confined.observed && confined.unobserved_reason.is_some(),
            "{confined:?}"
        );
        let made = world.outside().join("made");
        let known = ran
            .facts()
            .into_iter()
            .any(|fact| fact.operation == CreateFile && fact.path.is_some_and(|path| path.to_path_buf() == made));
        assert!(known && !made.exists(), "{user:?} {ran:?}");
        assert_eq!(ran.result().survivors, 0);
        assert_eq!(std::fs::read(world.workspace().join("here")).unwrap(), b"x\n");
    }
}

#[test]
fn the_daemon_itself_is_out_of_reach_and_the_answer_says_so() {
    for user in users() {
        let world = World::new(user);
        let ran = nested(&world, false);
        let result = ran.result();
        assert_eq!(result.exit_code, Some(125), "{user:?} {ran:?}");
        assert!(result.stderr.text.contains("no daemon answers on"), "{user:?} {ran:?}");
        let facts = ran.facts();
        let path = facts[0].path.as_ref().map(|path| path.to_path_buf());
        assert_eq!(
            (facts.len(), facts[0].operation, path),
            (1, ConnectUnix, Some(world.socket())),
            "{facts:#?}"
        );
    }
}

/// In a user namespace in which no other can be made, as in most containers: nothing is missing in the `landlock` tier.
#[test]
fn where_namespaces_are_not_permitted_everything_works() {
    if !can_run(
        "where_namespaces_are_not_permitted_everything_works",
        Feature::UserNamespaces,
    ) {
        return;
    }
    for user in users() {
        let world = World::without_daemon(user, "");
        let outside = world.outside();
        let command = format!(
            "echo in; touch a; chmod 600 a; touch {0}/made; chmod 777 {0}",
            outside.display()
        );
        let script = format!(
            "echo 0 > /proc/sys/user/max_user_namespaces && ! unshare --user true 2>/dev/null && \
             '{}' run --json --mode workspace-write --workspace . '{command}'",
            world.binary("dsh-exec").display()
        );
        let mut process = world.command("unshare");
        process.args([
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
        ]);
        let ran = Ran::of(process.arg(script).output().unwrap());
        let result = ran.result();
        assert_eq!(
            (result.stdout.text.as_str(), result.survivors),
            ("in\n", 0),
            "{user:?} {ran:?}"
        );
        assert_eq!(
            result.sandbox.confined.as_ref().unwrap().tier,
            dsh_policy::mode::Tier::Landlock
        );
        let operations: Vec<_> = ran.facts().iter().map(|fact| fact.operation).collect();
        assert_eq!(operations, [CreateFile, ChangeMode], "{user:?} {ran:?}");
        assert!(!outside.join("made").exists());
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&outside), mode(&world.workspace().join("a"))), (0o755, 0o600));
    }
}
