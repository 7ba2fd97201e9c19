//! The machine is what it is declared to be, and the product's doctor agrees with the kernel.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;

use dsh_policy::SandboxMode;
use dsh_policy::mode::{Guarantee, Tier};
use dsh_policy::probe::ProbeReport;
use dsh_tests::machine::{Feature, declared, has};
use dsh_tests::{World, users};

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
