//! A fact exists if and only if the sandbox itself refused: what must be one, what must not.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs;
use std::os::unix::fs::PermissionsExt;

use dsh_policy::SandboxMode::{self, ReadOnly, WorkspaceWrite};
use dsh_policy::denial::{Errno, Operation, Rule};
use dsh_tests::{User, World, fixture, tree, users};

#[test]
fn the_example_of_the_specification_has_exactly_its_two_facts() {
    for user in users() {
        let world = World::new(user);
        let file = world.home().join("file");
        world.write(&file, b"kept\n");
        let before = tree::picture(&world.home());
        let ran = world.run(WorkspaceWrite, "echo in > a; echo out > ~/x || true; chmod 600 ~/file");
        assert_eq!(fs::read(world.workspace().join("a")).unwrap(), b"in\n");
        tree::assert_same(&before, &tree::picture(&world.home()), "home");
        let facts = ran.facts();
        let told: Vec<_> = facts
            .iter()
            .map(|fact| {
                (
                    fact.operation,
                    fact.syscall.as_str(),
                    fact.path.as_ref().unwrap().to_path_buf(),
                    fact.errno,
                    fact.executable.as_ref().unwrap().to_path_buf(),
                )
            })
            .collect();
        let bash = fs::canonicalize("/bin/bash").unwrap();
        let chmod = fs::canonicalize("/bin/chmod").unwrap();
        assert_eq!(
            told,
            [
                (
                    Operation::CreateFile,
                    "openat",
                    world.home().join("x"),
                    Errno::Eacces,
                    bash
                ),
                (Operation::ChangeMode, "fchmodat", file, Errno::Eperm, chmod),
            ]
        );
        let result = ran.result();
        assert_eq!((result.exit_code, result.sandbox.denied), (Some(1), Some(true)));
    }
}

#[test]
fn the_password_file_is_a_fact_for_root_and_an_ordinary_error_for_everybody_else() {
    let before = fs::read("/etc/passwd").unwrap();
    for user in users() {
        let world = World::new(user);
        let ran = world.run(WorkspaceWrite, "echo x > /etc/passwd");
        assert_eq!(ran.result().exit_code, Some(1));
        let expected: &[(Operation, &str)] = if user == User::Root {
            &[(Operation::WriteFile, "/etc/passwd")]
        } else {
            &[]
        };
        let facts = ran.facts();
        let told: Vec<_> = facts
            .iter()
            .map(|fact| (fact.operation, fact.path.as_ref().unwrap().display()))
            .collect();
        let told: Vec<_> = told
            .iter()
            .map(|(operation, path)| (*operation, path.as_str()))
            .collect();
        assert_eq!(told, expected, "{user:?}");
        assert_eq!(ran.result().sandbox.denied, Some(user == User::Root));
    }
    assert_eq!(fs::read("/etc/passwd").unwrap(), before);
}

#[test]
fn a_swallowed_refusal_is_a_fact_of_a_successful_command() {
    for user in users() {
        let world = World::new(user);
        let ran = world.run(ReadOnly, "touch /var/tmp/dsh-must-not-appear 2>/dev/null; true");
        let facts = ran.facts();
        assert_eq!(facts.len(), 1, "{facts:#?}");
        assert_eq!(
            facts[0].path.as_ref().unwrap().display(),
            "/var/tmp/dsh-must-not-appear"
        );
        let result = ran.result();
        assert_eq!((result.exit_code, result.sandbox.denied), (Some(0), Some(false)));
        assert!(!fs::exists("/var/tmp/dsh-must-not-appear").unwrap());
    }
}

/// Failures that the sandbox has nothing to do with, each with the exit code that it has without any sandbox.
#[test]
fn ordinary_failures_are_no_facts() {
    let commands = [
        "false",
        "echo 'sandbox: permission denied' >&2; exit 1",
        "cat O/missing",
        "cat O/unreadable",
        "rm -f O/missing",
        "rm O/missing",
        "mkdir O/dir",
        "mkdir -p O/dir",
        "rmdir O/full",
        "rmdir O/file",
        "echo x > O/dir",
        "echo x > O/file/below",
        "echo x > O/missing/below",
        "mv O/missing O/other",
        "ln O/missing O/made",
        "ln -s x O/link",
        "chmod 600 O/missing",
        "test -e O/file && ls O > /dev/null && stat O/file > /dev/null",
        "exec 3< O/file; cat <&3 > /dev/null",
        "echo x > /dev/null; head -c1 /dev/zero > /dev/null; dd if=/dev/urandom of=/dev/null bs=1 count=1 2> /dev/null",
        "kill -0 $$",
        "cat /proc/self/status > /dev/null; ls /proc/self/fd > /dev/null",
    ];
    for user in users() {
        let world = World::new(user);
        fixture::lay(&world.outside(), user);
        let unreadable = world.outside().join("unreadable");
        world.write(&unreadable, b"");
        fs::set_permissions(&unreadable, fs::Permissions::from_mode(0o000)).unwrap();
        for mode in [ReadOnly, WorkspaceWrite] {
            for command in commands {
                let command = command.replace("O/", &format!("{}/", world.outside().display()));
                let before = tree::picture(&world.outside());
                let ran = world.run(mode, &command);
                assert_eq!(ran.facts(), vec![], "{user:?} {mode} {command}");
                assert_eq!(ran.result().sandbox.denied, Some(false), "{user:?} {mode} {command}");
                tree::assert_same(&before, &tree::picture(&world.outside()), &command);
                // Root keeps no capabilities in the sandbox: only there does a mode-000 file differ.
                if !command.contains("unreadable") {
                    let control = world.run(SandboxMode::DangerFullAccess, &command);
                    assert_eq!(
                        ran.result().exit_code,
                        control.result().exit_code,
                        "{user:?} {mode} {command}"
                    );
                }
            }
        }
    }
}

/// What an ordinary user cannot do anyway is no fact either, whatever the mode.
#[test]
fn what_somebody_else_owns_is_no_business_of_the_sandbox() {
    let world = World::new(User::Ordinary);
    for mode in [ReadOnly, WorkspaceWrite] {
        for command in [
            "chmod 600 /etc/hosts",
            "touch /etc/hosts",
            "mkdir /etc/dsh-made",
            "rm /etc/hosts",
            "mv /etc/hosts /etc/hosts2",
            "ln -s x /usr/bin/dsh-made",
            "mkdir -p /usr/local/bin",
            "cat /etc/shadow",
            "truncate -s 0 /etc/hosts",
            "chown 0:0 /etc/hosts",
        ] {
            let ran = world.run(mode, command);
            assert_eq!(ran.facts(), vec![], "{mode} {command}");
        }
    }
}

#[test]
fn the_same_refusal_again_is_one_fact_with_a_count() {
    for user in users() {
        let world = World::new(user);
        let target = world.outside().join("x");
        let script = format!(
            "for i in 1 2 3 4 5 6 7; do echo $i > {}; done 2>/dev/null; true",
            target.display()
        );
        let facts = world.run(WorkspaceWrite, script).facts();
        assert_eq!(facts.len(), 1, "{facts:#?}");
        assert_eq!(facts[0].count, 7);
        assert!(facts[0].first_ms <= facts[0].last_ms);
    }
}

#[test]
fn a_storm_of_refusals_is_bounded_and_counted() {
    let world = World::with_config(User::Ordinary, "maxDenials = 10\n");
    let script = format!(
        "for i in $(seq 100); do echo > {}/f$i; done 2>/dev/null; true",
        world.outside().display()
    );
    let confined = world.run(WorkspaceWrite, script).result().sandbox.confined.unwrap();
    assert_eq!((confined.denials.len(), confined.denials_dropped), (10, 90));
}

#[test]
fn a_fact_names_the_program_its_parents_and_what_would_allow_it() {
    for user in users() {
        let world = World::new(user);
        let target = world.outside().join("x");
        let ran = world.run(
            WorkspaceWrite,
            format!(
                "echo $$; bash -c 'bash -c \"touch {}; true\"; true'; true",
                target.display()
            ),
        );
        let facts = ran.facts();
        assert_eq!(facts.len(), 1, "{facts:#?}");
        let fact = &facts[0];
        assert_eq!(
            fact.executable.as_ref().unwrap().to_path_buf(),
            fs::canonicalize("/usr/bin/touch").unwrap()
        );
        let shell: u32 = ran.text().parse().unwrap();
        if ran.apart() {
            // The shell has a number of its own inside; facts have those of the host.
            assert_eq!(shell, 2, "after the first process");
            assert!(fact.parents.iter().all(|pid| *pid > 2 && *pid != fact.pid), "{fact:?}");
        } else {
            assert_eq!(
                fact.parents.last(),
                Some(&shell),
                "the chain ends at the command's shell: {fact:?}"
            );
        }
        assert_eq!(fact.parents.len(), 3, "touch <- bash <- bash <- shell: {fact:?}");
        assert_eq!(
            fact.allowed_by.as_deref(),
            Some(format!("writable {}", world.outside().display()).as_str())
        );
        assert_eq!(fact.rule, Rule::OutsideWritableRoots);
    }
}

/// The path is what the kernel would have acted on; what the program said is kept beside it.
#[test]
fn the_path_is_canonical_and_the_given_one_is_kept() {
    for user in users() {
        let world = World::new(user);
        fixture::lay(&world.outside(), user);
        let given = format!("{}/dir/.././link", world.outside().display());
        let facts = world
            .run(WorkspaceWrite, world.probe(&["open-wronly".into(), given.clone()]))
            .facts();
        assert_eq!(facts.len(), 1);
        assert_eq!(
            facts[0].path.as_ref().unwrap().to_path_buf(),
            world.outside().join("file")
        );
        assert_eq!(facts[0].given.as_ref().unwrap().display(), given);
    }
}

#[test]
fn a_refused_interface_of_the_kernel_is_a_fact() {
    use Operation::{ControlProcess, Ipc, KernelInterface, Mount, Namespace};
    for user in users() {
        let world = World::new(user);
        let mut bystander = world.command("/bin/sleep").arg("1000").spawn().unwrap();
        let pid = bystander.id().to_string();
        let rows: [(&[&str], Operation, &str, &str); 6] = [
            (&["unshare-user"], Namespace, "unshare", "OK"),
            // Only the superuser could mount at all.
            (
                &["mount-tmpfs", "/proc/self/fdinfo"],
                Mount,
                "mount",
                if user == User::Root { "OK" } else { "EPERM" },
            ),
            (&["io-uring"], KernelInterface, "io_uring_setup", "OK"),
            (&["add-key"], Ipc, "add_key", "OK"),
            (&["shmget"], Ipc, "shmget", "OK"),
            (&["setpriority", &pid], ControlProcess, "setpriority", "OK"),
        ];
        for mode in [ReadOnly, WorkspaceWrite] {
            for (probe, operation, syscall, unconfined) in &rows {
                let ran = world.run(
                    mode,
                    world.probe(&probe.iter().map(ToString::to_string).collect::<Vec<_>>()),
                );
                // System V objects are the command's own there.
                let own = *syscall == "shmget" && ran.apart();
                let refused = operation.errno().as_str();
                assert_eq!(
                    ran.text(),
                    if own { "OK" } else { refused },
                    "{user:?} {mode} {probe:?}"
                );
                let facts = ran.facts();
                let told: Vec<_> = facts
                    .iter()
                    .map(|fact| (fact.operation, fact.syscall.as_str(), fact.rule))
                    .collect();
                let expected = [(*operation, *syscall, Rule::Confined)];
                assert_eq!(
                    told,
                    if *unconfined == "OK" && !own {
                        &expected[..]
                    } else {
                        &[]
                    },
                    "{user:?} {mode} {probe:?}"
                );
            }
        }
        for (probe, _, _, unconfined) in rows.iter().filter(|row| row.1 != Mount) {
            let control = world.run(
                SandboxMode::DangerFullAccess,
                world.probe(&probe.iter().map(ToString::to_string).collect::<Vec<_>>()),
            );
            assert_eq!(control.text(), *unconfined, "unconfined {user:?} {probe:?}");
        }
        bystander.kill().unwrap();
        bystander.wait().unwrap();
    }
}

/// A link of root's in the user's own folder: the user may rename it, but not change its owner, with or without a sandbox.
#[test]
fn an_owner_that_somebody_else_has_is_an_ordinary_error() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("left out: making a file of root's needs root");
        return;
    }
    let world = World::new(User::Ordinary);
    let link = world.workspace().join("of-root");
    std::os::unix::fs::symlink("file", &link).unwrap();
    for door in ["fchownat-nofollow", "lchown", "utimensat-nofollow"] {
        for mode in SandboxMode::ALL {
            let ran = world.run(*mode, world.probe(&[door.into(), link.display().to_string()]));
            assert_eq!(ran.text(), "EPERM", "{door} {mode}");
            assert!(
                ran.result()
                    .sandbox
                    .confined
                    .is_none_or(|confined| confined.denials.is_empty()),
                "{door} {mode} {ran:?}"
            );
        }
    }
}
