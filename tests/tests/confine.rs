//! Every door in every mode: the errno that the program sees, the fact that is reported, and what is on disk afterwards.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::path::Path;

use dsh_policy::SandboxMode::{self, DangerFullAccess, ReadOnly, WorkspaceWrite};
use dsh_policy::denial::{DenialFact, Operation, Rule};
use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{Ran, User, World, fixture, tree, users};

/// A probe and what its refusal must look like. `@` stands for the folder that is acted on.
struct Case {
    probe: &'static [&'static str],
    operation: Operation,
    syscall: &'static str,
    path: &'static str,
    second: Option<&'static str>,
    only: Option<User>,
}

const fn case(probe: &'static [&'static str], operation: Operation, syscall: &'static str, path: &'static str) -> Case {
    Case {
        probe,
        operation,
        syscall,
        path,
        second: None,
        only: None,
    }
}
const fn two(
    probe: &'static [&'static str],
    operation: Operation,
    syscall: &'static str,
    path: &'static str,
    second: &'static str,
) -> Case {
    Case {
        probe,
        operation,
        syscall,
        path,
        second: Some(second),
        only: None,
    }
}

use Operation::{
    ChangeFlags, ChangeMode, ChangeOwner, ChangeTimes, ChangeXattr, CreateFile, Link, MakeDir, MakeNode, RemoveDir,
    RemoveFile, Rename, Symlink, Truncate, WriteFile,
};

/// Opening and cutting.
const OPENS: &[Case] = &[
    case(&["open-wronly", "@/file"], WriteFile, "openat", "@/file"),
    case(&["open-rdwr", "@/file"], WriteFile, "openat", "@/file"),
    case(&["open-append", "@/file"], WriteFile, "openat", "@/file"),
    case(&["open-trunc", "@/file"], WriteFile, "openat", "@/file"),
    case(&["open-trunc-rdonly", "@/file"], Truncate, "openat", "@/file"),
    case(&["open-creat", "@/file"], WriteFile, "openat", "@/file"),
    case(&["open-creat", "@/made"], CreateFile, "openat", "@/made"),
    case(&["open-creat-rdonly", "@/made"], CreateFile, "openat", "@/made"),
    case(&["open-creat-excl", "@/made"], CreateFile, "openat", "@/made"),
    case(&["open-tmpfile", "@"], CreateFile, "openat", "@"),
    case(&["open-wronly", "@/link"], WriteFile, "openat", "@/file"),
    case(&["open-creat", "@/dangling"], CreateFile, "openat", "@/made"),
    case(&["open-dirfd", "@/dir", "made"], CreateFile, "openat", "@/dir/made"),
    case(&["open-dirfd", "@/dir", "../file"], WriteFile, "openat", "@/file"),
    case(&["reopen-rdonly", "@/file"], WriteFile, "openat", "@/file"),
    case(&["reopen-path", "@/file"], WriteFile, "openat", "@/file"),
    case(&["truncate", "@/file"], Truncate, "truncate", "@/file"),
    case(&["truncate", "@/link"], Truncate, "truncate", "@/file"),
    case(&["open", "@/file"], WriteFile, "open", "@/file"),
    case(&["creat", "@/file"], WriteFile, "creat", "@/file"),
    case(&["creat", "@/made"], CreateFile, "creat", "@/made"),
];

/// Names made, removed, moved and linked.
const NAMES: &[Case] = &[
    case(&["mkdir", "@/made"], MakeDir, "mkdir", "@/made"),
    case(&["mkdirat", "@/made/"], MakeDir, "mkdirat", "@/made"),
    case(&["unlink", "@/file"], RemoveFile, "unlink", "@/file"),
    case(&["unlinkat", "@/link"], RemoveFile, "unlinkat", "@/link"),
    case(
        &["unlinkat-dirfd", "@/full", "inner"],
        RemoveFile,
        "unlinkat",
        "@/full/inner",
    ),
    case(&["rmdir", "@/dir"], RemoveDir, "rmdir", "@/dir"),
    case(&["unlinkat-dir", "@/dir"], RemoveDir, "unlinkat", "@/dir"),
    two(&["rename", "@/file", "@/made"], Rename, "rename", "@/file", "@/made"),
    two(
        &["renameat", "@/file", "@/other"],
        Rename,
        "renameat",
        "@/file",
        "@/other",
    ),
    two(
        &["renameat2", "@/dir", "@/made"],
        Rename,
        "renameat2",
        "@/dir",
        "@/made",
    ),
    two(
        &["renameat2-noreplace", "@/file", "@/made"],
        Rename,
        "renameat2",
        "@/file",
        "@/made",
    ),
    two(
        &["renameat2-exchange", "@/file", "@/full"],
        Rename,
        "renameat2",
        "@/file",
        "@/full",
    ),
    two(&["link", "@/file", "@/made"], Link, "link", "@/file", "@/made"),
    two(&["linkat", "@/file", "@/made"], Link, "linkat", "@/file", "@/made"),
    two(
        &["linkat-follow", "@/link", "@/made"],
        Link,
        "linkat",
        "@/file",
        "@/made",
    ),
    two(
        &["linkat-empty", "@/file", "@/made"],
        Link,
        "linkat",
        "@/file",
        "@/made",
    ),
    two(
        &["linkat-magic", "@/file", "@/made"],
        Link,
        "linkat",
        "@/file",
        "@/made",
    ),
    case(&["symlink", "anywhere", "@/made"], Symlink, "symlink", "@/made"),
    case(&["symlinkat", "anywhere", "@/made"], Symlink, "symlinkat", "@/made"),
    case(&["mknod", "@/made"], MakeNode, "mknod", "@/made"),
    case(&["mkfifo", "@/made"], MakeNode, "mknodat", "@/made"),
    case(&["mknod-socket", "@/made"], MakeNode, "mknodat", "@/made"),
    case(&["mknod-file", "@/made"], CreateFile, "mknodat", "@/made"),
    case(&["bind-unix", "@/made"], MakeNode, "bind", "@/made"),
];

/// Metadata, by path, by descriptor, by `/proc/self/fd`.
const METADATA: &[Case] = &[
    case(&["chmod", "@/file"], ChangeMode, "chmod", "@/file"),
    case(&["chmod", "@/link"], ChangeMode, "chmod", "@/file"),
    case(&["fchmodat", "@/dir"], ChangeMode, "fchmodat", "@/dir"),
    case(&["fchmod-rdonly", "@/file"], ChangeMode, "fchmod", "@/file"),
    case(&["fchmodat2-empty", "@/file"], ChangeMode, "fchmodat2", "@/file"),
    case(&["chmod-magic", "@/file"], ChangeMode, "fchmodat", "@/file"),
    case(&["setxattr-acl", "@/file"], ChangeMode, "setxattr", "@/file"),
    case(&["chown", "@/file"], ChangeOwner, "chown", "@/file"),
    case(&["lchown", "@/link"], ChangeOwner, "lchown", "@/link"),
    case(&["fchown-rdonly", "@/file"], ChangeOwner, "fchown", "@/file"),
    case(&["fchownat", "@/link"], ChangeOwner, "fchownat", "@/file"),
    case(&["fchownat-nofollow", "@/link"], ChangeOwner, "fchownat", "@/link"),
    case(&["fchownat-empty", "@/file"], ChangeOwner, "fchownat", "@/file"),
    case(&["utime", "@/file"], ChangeTimes, "utime", "@/file"),
    case(&["utimes", "@/file"], ChangeTimes, "utimes", "@/file"),
    case(&["futimesat", "@/file"], ChangeTimes, "futimesat", "@/file"),
    case(&["utimensat", "@/link"], ChangeTimes, "utimensat", "@/file"),
    case(&["utimensat-nofollow", "@/link"], ChangeTimes, "utimensat", "@/link"),
    case(&["utimensat-now", "@/file"], ChangeTimes, "utimensat", "@/file"),
    case(&["futimens-rdonly", "@/file"], ChangeTimes, "utimensat", "@/file"),
    case(&["setxattr", "@/file"], ChangeXattr, "setxattr", "@/file"),
    case(&["lsetxattr", "@/file"], ChangeXattr, "lsetxattr", "@/file"),
    case(&["fsetxattr-rdonly", "@/file"], ChangeXattr, "fsetxattr", "@/file"),
    case(&["setxattrat", "@/file"], ChangeXattr, "setxattrat", "@/file"),
    case(&["removexattr", "@/attr"], ChangeXattr, "removexattr", "@/attr"),
    case(&["lremovexattr", "@/attr"], ChangeXattr, "lremovexattr", "@/attr"),
    case(
        &["fremovexattr-rdonly", "@/attr"],
        ChangeXattr,
        "fremovexattr",
        "@/attr",
    ),
    case(&["removexattrat", "@/attr"], ChangeXattr, "removexattrat", "@/attr"),
    case(&["ioctl-setflags", "@/file"], ChangeFlags, "ioctl", "@/file"),
    case(&["ioctl-fssetxattr", "@/file"], ChangeFlags, "ioctl", "@/file"),
    case(&["file_setattr", "@/file"], ChangeFlags, "file_setattr", "@/file"),
];

impl Case {
    fn arguments(&self, place: &Path) -> Vec<String> {
        self.probe.iter().map(|word| at(word, place)).collect()
    }
}
fn at(text: &str, place: &Path) -> String {
    text.replace('@', place.to_str().unwrap())
}

/// The fact says all of this and there is no other.
#[track_caller]
fn assert_one_fact(ran: &Ran, case: &Case, place: &Path, rule: Rule, world: &World) {
    let facts = ran.facts();
    let [fact] = facts.as_slice() else {
        panic!("{:?}: {} facts instead of one: {facts:#?}", case.probe, facts.len())
    };
    assert_fact(fact, case, place, rule, world);
}

#[track_caller]
fn assert_fact(fact: &DenialFact, case: &Case, place: &Path, rule: Rule, world: &World) {
    let what = format!("{:?} in {}: {fact:#?}", case.probe, place.display());
    assert_eq!(fact.operation, case.operation, "{what}");
    assert_eq!(fact.syscall, case.syscall, "{what}");
    assert_eq!(
        fact.path.as_ref().map(|path| path.display()),
        Some(at(case.path, place)),
        "{what}"
    );
    assert_eq!(
        fact.second_path.as_ref().map(|path| path.display()),
        case.second.map(|path| at(path, place)),
        "{what}"
    );
    assert_eq!(fact.errno, case.operation.errno(), "{what}");
    assert_eq!(fact.rule, rule, "{what}");
    assert_eq!(fact.count, 1, "{what}");
    assert!(fact.pid > 1, "{what}");
    assert_eq!(
        fact.executable.as_ref().map(|path| path.to_path_buf()),
        Some(world.binary("dsh-probe")),
        "{what}"
    );
}

/// Runs one case in one place and mode and checks everything about it. Gives the failure as text, so that a table reports all of its rows.
fn check(world: &World, case: &Case, place: &Path, mode: SandboxMode) -> Result<(), String> {
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        check_or_panic(world, case, place, mode)
    }));
    outcome.map_err(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        format!(
            "{:?} {mode} {:?} {}: {}",
            world.user,
            case.probe,
            place.display(),
            text.unwrap_or_default()
        )
    })
}

fn check_or_panic(world: &World, case: &Case, place: &Path, mode: SandboxMode) {
    fixture::lay(place, world.user);
    let before = tree::picture(place);
    let ran = world.run(mode, world.probe(&case.arguments(place)));
    let after = tree::picture(place);
    let allowed = match mode {
        ReadOnly => None,
        WorkspaceWrite => (place == world.workspace()).then_some(()),
        DangerFullAccess => Some(()),
    };
    if allowed.is_some() {
        assert_eq!(ran.text(), "OK", "{ran:?}");
        // A file without a name leaves no trace; everything else must, or the probe proves nothing.
        assert!(
            before != after || case.probe[0] == "open-tmpfile",
            "the probe succeeded and nothing changed"
        );
        if mode == DangerFullAccess {
            assert_eq!(
                ran.json()["sandbox"].to_string(),
                r#"{"denied":false,"mode":"danger-full-access"}"#
            );
        } else {
            assert_eq!(ran.facts(), vec![]);
            assert_eq!(ran.result().sandbox.denied, Some(false));
        }
        return;
    }
    assert_eq!(ran.text(), case.operation.errno().as_str(), "{ran:?}");
    tree::assert_same(&before, &after, "refused");
    let rule = if mode == ReadOnly {
        Rule::ReadOnlyMode
    } else {
        Rule::OutsideWritableRoots
    };
    assert_one_fact(&ran, case, place, rule, world);
    assert_eq!(
        ran.result().sandbox.denied,
        Some(true),
        "the probe exits 1 after a refusal"
    );
    assert_eq!(ran.code(), 1);
}

/// A whole table in every mode, in the workspace and outside, as every user.
fn check_table(name: &str, table: &[Case]) {
    if !can_run(name, Feature::Landlock(1)) || !can_run(name, Feature::Seccomp) {
        return;
    }
    let mut failures = Vec::new();
    let mut rows = 0;
    for user in users() {
        let world = World::new(user);
        for case in table.iter().filter(|case| case.only.is_none_or(|only| only == user)) {
            for place in [world.outside(), world.workspace()] {
                for mode in SandboxMode::ALL {
                    rows += 1;
                    failures.extend(check(&world, case, &place, *mode).err());
                }
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {rows} rows of {name} failed:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn opening_and_cutting_files() {
    check_table("opening_and_cutting_files", OPENS);
}

#[test]
fn making_removing_moving_and_linking_names() {
    check_table("making_removing_moving_and_linking_names", NAMES);
}

#[test]
fn changing_metadata() {
    check_table("changing_metadata", METADATA);
}
