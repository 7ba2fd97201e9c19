//! The border between the workspace and everything else: nothing crosses it by renaming, linking, links, `..` or a held folder.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::path::{Path, PathBuf};

use dsh_policy::SandboxMode::{DangerFullAccess, WorkspaceWrite};
use dsh_policy::denial::Operation::{
    self, ChangeMode, ChangeTimes, ChangeXattr, CreateFile, Link, MakeDir, RemoveFile, Rename, Truncate, WriteFile,
};
use dsh_policy::denial::Rule;
use dsh_tests::{Ran, World, fixture, tree, users};

/// Probe, operation, system call, path and second path of the fact. `W/` and `O/` stand for the two folders.
type Row = (
    &'static [&'static str],
    Operation,
    &'static str,
    &'static str,
    Option<&'static str>,
);

/// Between the workspace (`W`) and outside (`O`): one allowed side does not make the operation allowed.
#[test]
fn nothing_moves_or_links_across_the_border() {
    let rows: &[Row] = &[
        (
            &["renameat2", "W/file", "O/made"],
            Rename,
            "renameat2",
            "W/file",
            Some("O/made"),
        ),
        (
            &["renameat2", "O/file", "W/made"],
            Rename,
            "renameat2",
            "O/file",
            Some("W/made"),
        ),
        (
            &["renameat2-exchange", "W/file", "O/file"],
            Rename,
            "renameat2",
            "W/file",
            Some("O/file"),
        ),
        (
            &["renameat2-exchange", "O/dir", "W/full"],
            Rename,
            "renameat2",
            "O/dir",
            Some("W/full"),
        ),
        (
            &["linkat", "W/file", "O/made"],
            Link,
            "linkat",
            "W/file",
            Some("O/made"),
        ),
        (
            &["linkat", "O/file", "W/made"],
            Link,
            "linkat",
            "O/file",
            Some("W/made"),
        ),
        (
            &["linkat-empty", "O/file", "W/made"],
            Link,
            "linkat",
            "O/file",
            Some("W/made"),
        ),
        (
            &["linkat-magic", "O/file", "W/made"],
            Link,
            "linkat",
            "O/file",
            Some("W/made"),
        ),
        (&["open-wronly", "W/way-out"], WriteFile, "openat", "O/file", None),
        (&["open-creat", "W/way-out-new"], CreateFile, "openat", "O/made", None),
        (
            &["open-creat", "W/dir/../../outside/made"],
            CreateFile,
            "openat",
            "O/made",
            None,
        ),
        (
            &["open-dirfd", "W/dir", "../../outside/made"],
            CreateFile,
            "openat",
            "O/made",
            None,
        ),
        (&["truncate", "W/way-out"], Truncate, "truncate", "O/file", None),
        (&["fchmodat", "W/way-out"], ChangeMode, "fchmodat", "O/file", None),
        (&["setxattr", "W/way-out"], ChangeXattr, "setxattr", "O/file", None),
        (&["utimensat", "W/way-out"], ChangeTimes, "utimensat", "O/file", None),
        (
            &["unlinkat", "W/way-out-dir/inner"],
            RemoveFile,
            "unlinkat",
            "O/full/inner",
            None,
        ),
        (
            &["mkdirat", "W/way-out-dir/made"],
            MakeDir,
            "mkdirat",
            "O/full/made",
            None,
        ),
    ];
    let place = |world: &World, text: &str| {
        let text = text
            .strip_prefix("W/")
            .map(|rest| world.workspace().join(rest))
            .unwrap_or_else(|| {
                text.strip_prefix("O/")
                    .map_or_else(|| text.into(), |rest| world.outside().join(rest))
            });
        text.to_str().unwrap().to_owned()
    };
    for user in users() {
        let world = World::new(user);
        let lay = || {
            for folder in [world.workspace(), world.outside()] {
                fixture::lay(&folder, user);
            }
            for (name, target) in [("way-out", "file"), ("way-out-new", "made"), ("way-out-dir", "full")] {
                std::os::unix::fs::symlink(world.outside().join(target), world.workspace().join(name)).unwrap();
                user.own(&world.workspace().join(name));
            }
        };
        for (probe, operation, syscall, path, second) in rows {
            let arguments: Vec<String> = probe.iter().map(|word| place(&world, word)).collect();
            lay();
            let before = tree::picture(world.folder().join("outside").as_path());
            let inside = tree::picture(&world.workspace());
            let ran = world.run(WorkspaceWrite, world.probe(&arguments));
            assert_eq!(ran.text(), operation.errno().as_str(), "{user:?} {probe:?}");
            tree::assert_same(&before, &tree::picture(&world.outside()), "outside");
            tree::assert_same(&inside, &tree::picture(&world.workspace()), "workspace");
            let facts = ran.facts();
            assert_eq!(facts.len(), 1, "{user:?} {probe:?}: {facts:#?}");
            let fact = &facts[0];
            assert_eq!(
                (fact.operation, fact.syscall.as_str()),
                (*operation, *syscall),
                "{probe:?}"
            );
            assert_eq!(fact.path.as_ref().unwrap().display(), place(&world, path), "{probe:?}");
            assert_eq!(
                fact.second_path.as_ref().map(|path| path.display()),
                second.map(|text| place(&world, text))
            );
            assert_eq!(
                (fact.rule, fact.errno),
                (Rule::OutsideWritableRoots, operation.errno()),
                "{probe:?}"
            );

            lay();
            let control = world.run(DangerFullAccess, world.probe(&arguments));
            assert_eq!(
                control.text(),
                "OK",
                "unconfined, {user:?} {probe:?} must succeed or it proves nothing"
            );
        }
        // Links in the workspace are the workspace's own: made, moved and removed wherever they point.
        lay();
        for probe in [
            ["symlinkat", "/etc/passwd", "W/new-link"].as_slice(),
            &["renameat2", "W/way-out", "W/renamed"],
            &["fchownat-nofollow", "W/renamed"],
            &["unlinkat", "W/renamed"],
        ] {
            let arguments: Vec<String> = probe.iter().map(|word| place(&world, word)).collect();
            let ran = world.run(WorkspaceWrite, world.probe(&arguments));
            assert_eq!(
                (ran.text(), ran.facts()),
                ("OK".to_owned(), vec![]),
                "{user:?} {probe:?}"
            );
        }
    }
}

#[test]
fn a_held_folder_that_is_moved_out_takes_its_rights_with_it_nowhere() {
    for user in users() {
        let world = World::new(user);
        let (workspace, outside) = (world.workspace(), world.outside());
        fixture::lay(&workspace, user);
        fixture::lay(&outside, user);
        let [ready, go] = ["ready", "go"].map(|name| workspace.join(name));
        let words = |directory: &Path| {
            [
                "open-held-dir",
                directory.to_str().unwrap(),
                "made",
                ready.to_str().unwrap(),
                go.to_str().unwrap(),
            ]
            .map(str::to_owned)
        };
        let mut child = world
            .json_command(WorkspaceWrite, &[], world.probe(&words(&workspace.join("dir"))))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let waited = dsh_tests::process::wait_until(std::time::Duration::from_secs(10), || ready.exists());
        std::fs::rename(workspace.join("dir"), outside.join("moved")).unwrap();
        world.write(&go, b"");
        let ran = Ran::of({
            let mut text = Vec::new();
            std::io::Read::read_to_end(child.stdout.as_mut().unwrap(), &mut text).unwrap();
            std::process::Output {
                status: child.wait().unwrap(),
                stdout: text,
                stderr: Vec::new(),
            }
        });
        assert!(waited, "the probe never opened the folder: {ran:?}");
        assert_eq!(ran.text(), "EACCES");
        assert!(!outside.join("moved/made").exists());
        let facts = ran.facts();
        assert_eq!(facts.len(), 1, "{facts:#?}");
        // Seen from a mount of its own, what was moved out of it has no name any more.
        let name = if ran.apart() {
            PathBuf::from("/(unreachable)/made")
        } else {
            outside.join("moved/made")
        };
        assert_eq!(facts[0].path.as_ref().unwrap().to_path_buf(), name);
        assert_eq!(
            (facts[0].operation, facts[0].rule),
            (CreateFile, Rule::OutsideWritableRoots)
        );
    }
}
