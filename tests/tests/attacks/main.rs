//! The attack suite: every door that is known, tried from inside a command, in each mode and as each user. For each the table says what the program sees
//! and which fact is reported; a picture of everything outside says whether it had an effect.
//!
//! `DSH_TEST_TIER` names the tier that is attacked; without it, it is the best that the daemon offers.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod files;
mod kernel;
mod processes;
mod sockets;

use std::ffi::OsStr;

use dsh_policy::SandboxMode::{DangerFullAccess, ReadOnly, WorkspaceWrite};
use dsh_policy::denial::Operation;
use dsh_policy::mode::Tier;
use dsh_tests::outside::Outside;
use dsh_tests::{User, World, users};

/// What a program sees of an attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The operation's own error, and one fact of this operation.
    Fact(Operation),
    /// This answer of the kernel's and no fact: it would be the same without a sandbox, or nothing is there to act on.
    Plain(&'static str),
}

/// The answer of one tier, to one user or to both.
pub(crate) type ByTier = (Tier, Option<User>, Seen);

/// One door. Words of `probe` that [`Outside::fill`] knows stand for what is outside.
pub(crate) struct Attack {
    pub(crate) probe: &'static [&'static str],
    /// The call of the fact.
    pub(crate) syscall: &'static str,
    pub(crate) root: Seen,
    pub(crate) ordinary: Seen,
    /// Where a tier answers otherwise: it hides the target, so that there is nothing to refuse.
    pub(crate) tiers: &'static [ByTier],
    /// Whether the same call works without a sandbox, for root: then the attack is a real one.
    pub(crate) works: bool,
}

/// Refused to everybody, and it would work.
pub(crate) const fn door(probe: &'static [&'static str], syscall: &'static str, operation: Operation) -> Attack {
    Attack {
        probe,
        syscall,
        root: Seen::Fact(operation),
        ordinary: Seen::Fact(operation),
        tiers: &[],
        works: true,
    }
}

/// Refused to everybody; whether it would work depends on the machine.
pub(crate) const fn perhaps(probe: &'static [&'static str], syscall: &'static str, operation: Operation) -> Attack {
    Attack {
        works: false,
        ..door(probe, syscall, operation)
    }
}

/// What only root may do: an ordinary user gets this answer with and without a sandbox.
pub(crate) const fn privileged(
    probe: &'static [&'static str],
    syscall: &'static str,
    operation: Operation,
    ordinary: &'static str,
) -> Attack {
    Attack {
        ordinary: Seen::Plain(ordinary),
        works: false,
        ..door(probe, syscall, operation)
    }
}

/// What comes to nothing, with this answer: a call that does not exist for confined commands, or a power that they have given up.
pub(crate) const fn nothing(probe: &'static [&'static str], answer: &'static str) -> Attack {
    Attack {
        probe,
        syscall: "",
        root: Seen::Plain(answer),
        ordinary: Seen::Plain(answer),
        tiers: &[],
        works: false,
    }
}

/// In namespaces of its own the command finds no such process.
pub(crate) const NO_PROCESS: &[ByTier] = &[(Tier::Namespace, None, Seen::Plain("ESRCH"))];
/// There is no such name.
pub(crate) const NO_NAME: &[ByTier] = &[(Tier::Namespace, None, Seen::Plain("ENOENT"))];
/// There is no object of that number.
pub(crate) const NO_OBJECT: &[ByTier] = &[(Tier::Namespace, None, Seen::Plain("EINVAL"))];
/// What it acts on is the command's own.
pub(crate) const OWN: &[ByTier] = &[(Tier::Namespace, None, Seen::Plain("OK"))];

/// The command's own processes; where the owner's id is not known inside, not even those.
pub(crate) const OWN_USER: &[ByTier] = &[
    (Tier::Namespace, Some(User::Ordinary), Seen::Plain("ESRCH")),
    (Tier::Namespace, None, Seen::Plain("OK")),
];
/// An ordinary user's namespaces know its own id and no other.
pub(crate) const NO_ID: &[ByTier] = &[(Tier::Namespace, Some(User::Ordinary), Seen::Plain("EINVAL"))];

impl Attack {
    /// The same attack with other answers in some tiers.
    pub(crate) const fn but(self, tiers: &'static [ByTier]) -> Self {
        Self { tiers, ..self }
    }

    fn seen(&self, user: User, tier: Tier) -> Seen {
        let special = self
            .tiers
            .iter()
            .find(|(known, who, _)| *known == tier && who.is_none_or(|who| who == user));
        special.map_or(
            if user == User::Root { self.root } else { self.ordinary },
            |(_, _, seen)| *seen,
        )
    }
}

/// Tries each door in both confined modes as each user.
pub(crate) fn attack(network: &str, attacks: &[Attack]) {
    for user in users() {
        let world = World::new(user);
        let outside = Outside::new(&world);
        let options = ["--network", network].map(OsStr::new);
        let mut before = outside.picture();
        let mut wrong = Vec::new();
        for attack in attacks {
            let words: Vec<String> = attack.probe.iter().map(|word| outside.fill(word)).collect();
            for mode in [ReadOnly, WorkspaceWrite] {
                let ran = world.run_with(mode, &options, world.probe(&words));
                let tier = ran.result().sandbox.confined.expect("the command was confined").tier;
                let facts = ran.facts();
                let found: Vec<_> = facts
                    .iter()
                    .map(|fact| (fact.operation, fact.syscall.as_str()))
                    .collect();
                let (text, expected) = match attack.seen(user, tier) {
                    Seen::Fact(operation) => (operation.errno().as_str(), vec![(operation, attack.syscall)]),
                    Seen::Plain(answer) => (answer, vec![]),
                };
                if ran.text() != text || found != expected {
                    wrong.push(format!(
                        "{:?} as {user:?} in {mode}: {} with {found:?}, expected {text} with {expected:?}",
                        attack.probe,
                        ran.text()
                    ));
                }
                let after = outside.picture();
                if after != before {
                    wrong.push(format!(
                        "{:?} as {user:?} in {mode} had an effect: {}",
                        attack.probe,
                        difference(&before, &after)
                    ));
                    before = after;
                }
            }
        }
        assert!(
            wrong.is_empty(),
            "{} of {}:\n{}",
            wrong.len(),
            attacks.len(),
            wrong.join("\n")
        );
    }
}

/// The lines that differ.
fn difference(before: &str, after: &str) -> String {
    let pairs = before.lines().zip(after.lines()).filter(|(old, new)| old != new);
    pairs.map(|(old, new)| format!("\n  {old}\n  {new}")).collect()
}

/// The same calls without a sandbox: an attack that could not succeed proves nothing.
pub(crate) fn control(attacks: &[Attack]) {
    let user = users()[0];
    if user != User::Root {
        eprintln!("control: left out, only root can make all of these calls");
        return;
    }
    let world = World::new(user);
    let mut wrong = Vec::new();
    for attack in attacks.iter().filter(|attack| attack.works) {
        let outside = Outside::new(&world);
        let words: Vec<String> = attack.probe.iter().map(|word| outside.fill(word)).collect();
        let ran = world.run(DangerFullAccess, world.probe(&words));
        if ran.text() != "OK" {
            wrong.push(format!("{:?}: {}", attack.probe, ran.text()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn there_are_many_doors_and_each_is_there_once() {
    let tables = [
        files::DOORS,
        sockets::UNIX,
        sockets::NETWORK,
        processes::DOORS,
        kernel::NAMESPACES,
        kernel::IPC,
        kernel::INTERFACES,
    ];
    let mut probes: Vec<_> = tables
        .iter()
        .flat_map(|table| table.iter().map(|attack| attack.probe))
        .collect();
    let count = probes.len();
    probes.sort_unstable();
    probes.dedup();
    assert_eq!(probes.len(), count);
    assert!(count >= 150, "{count}");
}
