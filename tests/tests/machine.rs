//! The machine is what it is declared to be, and the product's doctor agrees with the kernel.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::process::Command;

use dsh_policy::SandboxMode;
use dsh_policy::mode::{Guarantee, Tier};
use dsh_policy::probe::ProbeReport;
use dsh_tests::machine::{Feature, can_run, declared, has};
use dsh_tests::{World, binaries, users};

#[test]
fn every_declared_feature_is_there() {
    for feature in declared() {
        assert!(
            has(feature),
            "DSH_TEST_EXPECT declares {feature:?}, this machine does not have it"
        );
    }
    assert!(
        std::env::var_os("CI").is_none() || !declared().is_empty(),
        "CI has to declare what its machine can do in DSH_TEST_EXPECT, or tests are left out unseen"
    );
}

#[test]
fn doctor_says_what_the_kernel_says() {
    for user in users() {
        let world = World::new(user);
        let output = world
            .dsh_exec(&["doctor", "--json", "--socket"].map(OsStr::new))
            .arg(world.socket())
            .output()
            .unwrap();
        let report: ProbeReport =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(
            (report.kernel.as_str(), report.arch.as_str()),
            (release.trim(), std::env::consts::ARCH)
        );
        assert_eq!(report.landlock_abi > 0, has(Feature::Landlock(1)));
        if report.landlock_abi > 0 {
            assert!(has(Feature::Landlock(report.landlock_abi)) && !has(Feature::Landlock(report.landlock_abi + 1)));
        }
        assert_eq!(report.seccomp_notify, has(Feature::Seccomp), "{report:?}");
        let tiers: Vec<Tier> = report.tiers.iter().map(|tier| tier.tier).collect();
        assert_eq!(tiers, Tier::ALL, "every tier is reported, best first");
        for tier in &report.tiers {
            assert_eq!(
                tier.reason.is_some(),
                !tier.usable,
                "a tier that cannot be used says why: {tier:?}"
            );
        }
        assert_eq!(
            output.status.code(),
            Some(if report.best_tier().is_some() { 0 } else { 1 })
        );
        let text = world
            .dsh_exec(&["doctor", "--socket"].map(OsStr::new))
            .arg(world.socket())
            .output()
            .unwrap();
        let text = String::from_utf8(text.stdout).unwrap();
        for word in [report.kernel.as_str(), "landlock", "namespace", "seccomp"] {
            assert!(text.to_lowercase().contains(&word.to_lowercase()), "{word}: {text}");
        }
    }
}

/// What a result says about enforcement is what doctor says about the tier that was used.
#[test]
fn a_result_names_the_tier_and_every_guarantee_it_lacks() {
    for user in users() {
        let world = World::new(user);
        for mode in [SandboxMode::ReadOnly, SandboxMode::WorkspaceWrite] {
            let confined = world.run(mode, "true").result().sandbox.confined.unwrap();
            let partial = confined.enforcement.as_str() == "partial";
            assert_eq!(partial, !confined.unenforced.is_empty(), "{confined:?}");
            for promised in [Guarantee::FileWrites, Guarantee::FileMetadata, Guarantee::Facts] {
                assert!(
                    confined.unenforced.iter().all(|lack| lack.guarantee != promised),
                    "{mode}: {confined:?}"
                );
            }
            assert!(confined.unenforced.iter().all(|lack| !lack.reason.is_empty()));
        }
    }
}

/// The helper's probe, after `setup` in user and mount namespaces of its own, so that nothing of the machine changes.
fn probe_after(setup: &str) -> ProbeReport {
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c"])
        .arg(format!("{setup} && exec \"$0\" --probe"))
        .arg(binaries::directory().join("dsh-exec-helper"))
        .output()
        .unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Some hosts permit the user namespace and refuse what it is for: only the whole set-up tells, and what was refused is named.
#[test]
fn what_a_host_refuses_of_the_namespaces_is_named_and_costs_the_landlock_tier_nothing() {
    let test = "what_a_host_refuses_of_the_namespaces_is_named_and_costs_the_landlock_tier_nothing";
    if !can_run(test, Feature::UserNamespaces) {
        return;
    }
    let limit = |name: &str| format!("echo 0 >/proc/sys/user/max_{name}_namespaces");
    let full = |part: &str| {
        Some(format!(
            "step namespaces failed: No space left on device (os error 28) ({part})"
        ))
    };
    let hidden = "step mounts failed: Operation not permitted (os error 1) (fresh /proc)".to_owned();
    for (setup, reason) in [
        ("true".to_owned(), None),
        (limit("user"), full("user namespace")),
        (limit("mnt"), full("mount namespace")),
        (limit("pid"), full("pid namespace")),
        (limit("ipc"), full("ipc namespace")),
        (limit("net"), full("net namespace")),
        // As in a container that hides parts of /proc: a fresh one would show them.
        ("mount -t tmpfs none /proc/fs".to_owned(), Some(hidden)),
    ] {
        let report = probe_after(&setup);
        let found = (report.user_namespaces, report.user_namespaces_reason);
        assert_eq!(found, (reason.is_none(), reason), "{setup}");
        if has(Feature::Landlock(1)) {
            let landlock = report.tiers.iter().find(|tier| tier.tier == Tier::Landlock).unwrap();
            assert_eq!((landlock.usable, &landlock.reason), (true, &None), "{setup}");
        }
    }
}
