//! The probe of a host, also on a busy machine: its child is refused things from its first moment on, so a lost refusal shows here.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod support;

use std::process::Command;

use dsh_policy::mode::Tier;
use dsh_policy::probe::ProbeReport;

#[test]
fn many_probes_at_once_agree_that_the_landlock_tier_holds() {
    let probe = || {
        let output = Command::new(support::helper())
            .arg("--probe")
            .env_clear()
            .output()
            .unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        dsh_policy::codec::from_json::<ProbeReport>(&output.stdout).unwrap()
    };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(move || {
                for _ in 0..10 {
                    let report = probe();
                    let landlock = report.tiers.iter().find(|tier| tier.tier == Tier::Landlock).unwrap();
                    assert_eq!((landlock.usable, &landlock.reason), (true, &None));
                    assert!(report.seccomp_notify && report.landlock_abi > 0);
                }
            });
        }
    });
}

#[test]
fn started_by_hand_it_says_what_to_run_instead() {
    let output = Command::new(support::helper())
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(
        output.stderr,
        b"dsh-exec-helper is started by dsh-execd; run dsh-exec instead\n"
    );
}

#[test]
fn what_a_killed_probe_left_is_removed_by_the_next() {
    let folder = |name: &str| std::path::Path::new("/tmp").join(name);
    // No process has this number; the second name is of this one.
    let abandoned = folder("dsh-probe-4194304-test");
    let busy = folder(&format!("dsh-probe-{}-test", std::process::id()));
    let long_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    for folder in [&abandoned, &busy] {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("forbidden"), b"").unwrap();
        std::fs::File::open(folder).unwrap().set_modified(long_ago).unwrap();
    }
    assert!(
        Command::new(support::helper())
            .arg("--probe")
            .output()
            .unwrap()
            .status
            .success()
    );
    assert!(!abandoned.exists() && busy.exists());
    std::fs::remove_dir_all(busy).unwrap();
}
