//! `docs/doors.md` says what a fresh measurement says: no door open, what must work and does not, and which stopped doors are facts.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::path::Path;

use dsh_policy::mode::Tier;
use dsh_tests::doors::{self, Measured};
use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{User, users};

/// What a command with namespaces of its own does not find.
const ABSENT: [&str; 8] = [
    "abstract unix connect",
    "sigqueue/pidfd_send_signal outside",
    "pidfd_getfd outside",
    "read /proc/PID/environ",
    "read /proc/PID/cmdline",
    "write /proc/PID/oom_score_adj",
    "sysv shm (shared with outside)",
    "mq/posix: msgget outside",
];

#[test]
fn no_door_is_open_and_the_page_says_so() {
    if !can_run("no_door_is_open_and_the_page_says_so", Feature::Tools) {
        return;
    }
    let mut columns = Vec::new();
    for (user, tier) in users()
        .into_iter()
        .flat_map(|user| doors::tiers(user).into_iter().map(move |tier| (user, tier)))
    {
        let rows = doors::measure(user, tier);
        let bad: Vec<_> = rows.iter().filter(|row| row.is_bad()).map(|row| row.name).collect();
        // `strict` makes `/tmp` private, and only a mount namespace can put another folder under that name.
        let known: &[&str] = if tier == Tier::Landlock {
            &["write /tmp (usability)"]
        } else {
            &[]
        };
        assert_eq!(bad, known, "{user:?} in tier {tier}: {rows:#?}");
        let silent: Vec<_> = rows.iter().filter(|row| row.lacks_fact()).map(|row| row.name).collect();
        // What an ordinary user may not do anyway is nobody's refusal, and neither is what is not there.
        let natural = rows.iter().map(|row| row.name).filter(|name| {
            (*name == "bpf(2)" && user != User::Root) || (tier != Tier::Landlock && ABSENT.contains(name))
        });
        assert_eq!(silent, natural.collect::<Vec<_>>(), "{user:?} in tier {tier}");
        let name = if user == User::Root { "root" } else { "ordinary user" };
        columns.push((format!("{tier}, {name}"), rows));
    }
    assert!(!columns.is_empty(), "no tier could be measured");
    compare(&columns);
}

fn compare(columns: &[(String, Vec<Measured>)]) {
    let page = doors::page(columns);
    println!("{page}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/doors.md");
    if std::env::var_os("DSH_WRITE_DOORS").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    if users().len() < 2 || dsh_tests::world::tier().is_some() {
        eprintln!("the page is left uncompared: only a run as root in every tier measures all of its columns");
    } else {
        assert_eq!(
            page,
            std::fs::read_to_string(&file).unwrap_or_default(),
            "write it anew with DSH_WRITE_DOORS=1"
        );
    }
}
