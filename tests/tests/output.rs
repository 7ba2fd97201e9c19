//! What a command wrote: exact counts, the tail, the whole stream on disk, bytes as they were.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use dsh_policy::SandboxMode::{ReadOnly, WorkspaceWrite};
use dsh_policy::result::StreamResult;
use dsh_tests::{User, World, users};

fn spill(stream: &StreamResult) -> Vec<u8> {
    fs::read(stream.spill_path.as_ref().expect("a spill file").as_path()).unwrap()
}

#[test]
fn a_hundred_megabytes_are_counted_exactly_and_kept_whole_on_disk() {
    const LINES: u64 = 5_000_000; // of 20 bytes
    for user in users() {
        let world = World::with_config(user, "spillBytes = 200000000\n");
        let ran = world.run(ReadOnly, format!("seq -f 'line %014.0f' 1 {LINES}; exit 3"));
        let result = ran.result();
        assert_eq!(
            (result.exit_code, result.stdout.bytes, result.stdout.truncated),
            (Some(3), LINES * 20, true)
        );
        assert!(result.stdout.text.ends_with(&format!("line {LINES:014}\n")));
        assert_eq!(result.stdout.text.len(), 64_000);
        let path = result.stdout.spill_path.clone().unwrap().to_path_buf();
        let meta = fs::metadata(&path).unwrap();
        assert_eq!(
            (meta.len(), meta.mode() & 0o7777, meta.uid()),
            (LINES * 20, 0o600, user.id())
        );
        let folder = fs::metadata(path.parent().unwrap()).unwrap();
        assert_eq!((folder.mode() & 0o7777, folder.uid()), (0o700, user.id()));
        for (index, line) in fs::read(&path).unwrap().chunks(20).enumerate() {
            assert_eq!(line, format!("line {:014}\n", index + 1).as_bytes(), "line {index}");
        }
        let resident = dsh_tests::process::status_field(world.daemon_pid(), "VmHWM:").unwrap();
        let peak_kib: u64 = resident.split_whitespace().next().unwrap().parse().unwrap();
        assert!(
            peak_kib < 40 * 1024,
            "the daemon's memory is bounded whatever a command prints: {resident}"
        );
    }
}

#[test]
fn a_stream_over_the_spill_cap_offers_no_file() {
    for user in users() {
        let world = World::with_config(user, "spillBytes = 100000\n");
        let result = world
            .run(
                ReadOnly,
                "head -c 100001 /dev/zero | tr '\\0' a; head -c 100000 /dev/zero | tr '\\0' b >&2",
            )
            .result();
        assert_eq!((result.stdout.bytes, result.stdout.spill_path), (100_001, None));
        assert_eq!(result.stderr.bytes, 100_000);
        assert_eq!(spill(&result.stderr), vec![b'b'; 100_000]);
        let left = fs::read_dir(world.state().join("spill")).unwrap().count();
        assert_eq!(left, 1, "the incomplete file is removed");
    }
}

#[test]
fn what_fits_is_whole_and_makes_no_file() {
    for user in users() {
        let world = World::new(user);
        let result = world.run(ReadOnly, "head -c 64000 /dev/zero | tr '\\0' a").result();
        assert_eq!(
            (
                result.stdout.bytes,
                result.stdout.truncated,
                result.stdout.spill_path.as_ref()
            ),
            (64_000, false, None)
        );
        assert_eq!(result.stdout.text, "a".repeat(64_000));
        let result = world.run(ReadOnly, "head -c 64001 /dev/zero | tr '\\0' a").result();
        assert_eq!((result.stdout.bytes, result.stdout.truncated), (64_001, true));
        assert_eq!(result.stdout.text, "a".repeat(64_000));
        assert_eq!(spill(&result.stdout).len(), 64_001);
        let more = world.run_with(
            ReadOnly,
            &["--stdout-max-bytes", "70000"].map(OsStr::new),
            "head -c 70000 /dev/zero | tr '\\0' a",
        );
        assert_eq!(more.result().stdout.text.len(), 70_000);
    }
}

#[test]
fn bytes_that_are_no_text_are_kept_exactly() {
    for user in users() {
        let world = World::new(user);
        let result = world
            .run(ReadOnly, r"printf '\xff\x00\xe2\x82'; printf 'gr\xc3\xbc\xc3\x9f' >&2")
            .result();
        assert_eq!(result.stdout.bytes, 4);
        assert_eq!(result.stdout.raw.as_ref().unwrap().as_bytes(), b"\xff\x00\xe2\x82");
        assert_eq!(result.stdout.text, "\u{fffd}\0\u{fffd}");
        assert_eq!((result.stderr.text.as_str(), result.stderr.raw), ("grüß", None));
    }
}

/// 64 000 bytes of kept tail that begin in the middle of a character: the view drops the half, the file has it.
#[test]
fn a_character_is_never_cut_in_half() {
    for user in users() {
        let world = World::new(user);
        for lead in ["", "a", "ab", "abc"] {
            let result = world
                .run(
                    ReadOnly,
                    format!("printf '%s' '{lead}'; for i in $(seq 30000); do printf '€'; done"),
                )
                .result();
            let total = lead.len() as u64 + 90_000;
            assert_eq!((result.stdout.bytes, result.stdout.truncated), (total, true));
            assert!(
                result.stdout.text.chars().all(|c| c == '€'),
                "{:?}",
                &result.stdout.text[..12]
            );
            assert_eq!(result.stdout.text.chars().count(), 64_000 / 3);
            assert_eq!(spill(&result.stdout).len() as u64, total);
        }
    }
}

#[test]
fn the_streams_are_separate_and_each_in_order() {
    for user in users() {
        let world = World::new(user);
        let result = world
            .run(ReadOnly, "for i in $(seq 2000); do echo out $i; echo err $i >&2; done")
            .result();
        let expected = |name: &str| (1..=2000).map(|n| format!("{name} {n}\n")).collect::<String>();
        assert_eq!(result.stdout.text, expected("out"));
        assert_eq!(result.stderr.text, expected("err"));
    }
}

#[test]
fn endless_output_is_bounded_and_counted() {
    for user in users() {
        let world = World::with_config(user, "spillBytes = 1000000\n");
        let ran = world.run_with(ReadOnly, &["--timeout-ms", "1000"].map(OsStr::new), "yes");
        let result = ran.result();
        assert!(
            result.timed_out && result.stdout.bytes > 1_000_000,
            "{}",
            result.stdout.bytes
        );
        assert_eq!(
            (result.stdout.text.len(), result.stdout.spill_path, result.survivors),
            (64_000, None, 0)
        );
        assert!(ran.elapsed < Duration::from_secs(6), "{:?}", ran.elapsed);
    }
}

#[test]
fn output_before_a_kill_is_there_and_streamed_as_it_appears() {
    for user in users() {
        let world = World::new(user);
        let mut command = world.dsh_exec(&["run", "--timeout-ms", "1500", "--socket"].map(OsStr::new));
        command
            .arg(world.socket())
            .args(["--", "echo early; sleep 100"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let begun = Instant::now();
        let mut child = command.spawn().unwrap();
        let mut first = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
        assert_eq!(&first, b"early\n");
        assert!(
            begun.elapsed() < Duration::from_millis(1_000),
            "streamed live, not at the end: {:?}",
            begun.elapsed()
        );
        assert_eq!(child.wait().unwrap().code(), Some(124));
    }
}

#[test]
fn the_command_line_streams_both_streams_unchanged() {
    for user in users() {
        let world = World::new(user);
        let mut command = world.dsh_exec(&["run", "--socket"].map(OsStr::new));
        command
            .arg(world.socket())
            .args(["--", r"printf '\xff\x00out'; printf '\xfeerr' >&2; exit 7"]);
        let output = command.output().unwrap();
        assert_eq!(
            (output.status.code(), output.stdout.as_slice(), output.stderr.as_slice()),
            (Some(7), &b"\xff\x00out"[..], &b"\xfeerr"[..])
        );
        let mut large = world.dsh_exec(&["run", "--socket"].map(OsStr::new));
        large.arg(world.socket()).args(["--", "head -c 20000000 /dev/zero"]);
        assert_eq!(large.output().unwrap().stdout.len(), 20_000_000);
    }
}

#[test]
fn a_full_disk_below_the_spill_folder_withholds_the_file_and_nothing_else() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("left out: mounting a small file system needs root");
        return;
    }
    let world = World::new(User::Root);
    assert_eq!(world.run(ReadOnly, "true").code(), 0);
    let folder = world.state().join("spill");
    fs::create_dir_all(&folder).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m,mode=0700", "spill"])
        .arg(&folder)
        .status()
        .unwrap();
    assert!(mounted.success());
    let ran = world.run(ReadOnly, "head -c 5000000 /dev/zero | tr '\\0' a; echo END; exit 4");
    let _ = std::process::Command::new("umount").arg("-l").arg(&folder).status();
    let result = ran.result();
    assert_eq!(
        (result.exit_code, result.stdout.bytes, result.stdout.spill_path),
        (Some(4), 5_000_004, None)
    );
    assert!(result.stdout.text.ends_with("END\n"));
}

#[test]
fn nothing_of_ours_is_on_a_command_s_streams() {
    for user in users() {
        let world = World::new(user);
        for mode in [ReadOnly, WorkspaceWrite] {
            let mut command = world.dsh_exec(&["run", "--mode", mode.as_str(), "--socket"].map(OsStr::new));
            let output = command.arg(world.socket()).args(["--", "true"]).output().unwrap();
            assert_eq!(
                (output.status.code(), output.stdout, output.stderr),
                (Some(0), vec![], vec![]),
                "{mode}"
            );
        }
    }
}
