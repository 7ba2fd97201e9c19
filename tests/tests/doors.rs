//! `docs/doors.md` says what a fresh measurement says: no door open, nothing that must work broken, every stopped door a fact.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::path::Path;

use dsh_policy::mode::Tier;
use dsh_tests::doors::{self, Measured};
use dsh_tests::machine::{Feature, can_run};
use dsh_tests::{User, users};

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
        // What an ordinary user may not do anyway is nobody's refusal.
        let silent: Vec<_> = rows.iter().filter(|row| row.lacks_fact()).map(|row| row.name).collect();
        let expected: &[&str] = if user == User::Root { &[] } else { &["bpf(2)"] };
        assert_eq!(silent, expected, "{user:?} in tier {tier}");
        let name = if user == User::Root { "root" } else { "ordinary user" };
        columns.push((format!("{tier}, {name}"), rows));
    }
    compare(&columns);
}

fn compare(columns: &[(String, Vec<Measured>)]) {
    let page = doors::page(columns);
    println!("{page}");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/doors.md");
    if std::env::var_os("DSH_WRITE_DOORS").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    if users().len() < 2 || std::env::var_os("DSH_TEST_TIER").is_some() {
        eprintln!("the page is left uncompared: only a run as root in every tier measures all of its columns");
    } else {
        assert_eq!(
            page,
            std::fs::read_to_string(&file).unwrap_or_default(),
            "write it anew with DSH_WRITE_DOORS=1"
        );
    }
}
