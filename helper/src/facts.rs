//! The ledger of refusals: equal ones are counted, the number of distinct ones is bounded, and the first of each is also an event.
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::time::Instant;

use dsh_policy::DenialFact;
use dsh_policy::bytes::ByteString;
use dsh_policy::decide::allowed_by;
use dsh_policy::denial::{Operation, Rule};
use dsh_policy::plan::Confinement;

use crate::supervise::milliseconds;
use crate::tree;

/// What was refused, before it is known by whom.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// What was tried.
    pub(crate) operation: Operation,
    /// Which rule said no.
    pub(crate) rule: Rule,
    /// Canonical name.
    pub(crate) path: Option<Vec<u8>>,
    /// The name as given.
    pub(crate) given: Option<Vec<u8>>,
    /// Canonical second name.
    pub(crate) second: Option<Vec<u8>>,
    /// What it was when it has no name.
    pub(crate) detail: Option<String>,
}

impl Refusal {
    /// A refusal that is not about a path.
    pub(crate) fn of(operation: Operation, rule: Rule, detail: Option<String>) -> Self {
        Self {
            operation,
            rule,
            path: None,
            given: None,
            second: None,
            detail,
        }
    }
}

/// All refusals of one command.
#[derive(Debug)]
pub(crate) struct Ledger {
    started: Instant,
    shell: i32,
    limit: usize,
    facts: Vec<DenialFact>,
    /// From the hash of what makes two refusals equal to the places of the facts that have it.
    index: HashMap<u64, Vec<u32>>,
    dropped: u64,
    /// How many of the facts have been told of.
    told: usize,
}

impl Ledger {
    /// An empty one for a shell that starts now.
    pub(crate) fn new(shell: i32, limit: u32) -> Self {
        let limit = limit as usize;
        Self {
            started: Instant::now(),
            shell,
            limit,
            facts: Vec::new(),
            index: HashMap::new(),
            dropped: 0,
            told: 0,
        }
    }

    /// Adds one refusal.
    pub(crate) fn record(&mut self, thread: i32, syscall: &str, refusal: Refusal, confinement: &Confinement) {
        let now = milliseconds(self.started.elapsed());
        let pid = tree::thread_group(thread).unwrap_or(thread);
        let mut fact = DenialFact {
            operation: refusal.operation,
            syscall: syscall.to_owned(),
            given: refusal
                .given
                .filter(|given| Some(given) != refusal.path.as_ref())
                .map(ByteString),
            path: refusal.path.map(ByteString),
            second_path: refusal.second.map(ByteString),
            detail: refusal.detail,
            errno: refusal.operation.errno(),
            rule: refusal.rule,
            pid: pid.cast_unsigned(),
            parents: Vec::new(),
            executable: None,
            count: 1,
            first_ms: now,
            last_ms: now,
            allowed_by: None,
        };
        let key = key(&fact);
        let places = self.index.get(&key).map(Vec::as_slice).unwrap_or_default();
        if let Some(place) = places.iter().find(|place| self.facts[**place as usize].repeats(&fact)) {
            let known = &mut self.facts[*place as usize];
            known.count += 1;
            known.last_ms = now;
            return;
        }
        if self.facts.len() >= self.limit {
            self.dropped += 1;
            return;
        }
        fact.parents = tree::parents(pid, self.shell);
        fact.executable = rustix::fs::readlink(tree::proc_path(pid, "exe"), Vec::new())
            .ok()
            .map(|path| ByteString(path.into_bytes()));
        let path = fact.path.as_ref().map(ByteString::as_bytes);
        fact.allowed_by = allowed_by(confinement, fact.operation, fact.rule, path);
        self.index.entry(key).or_default().push(self.facts.len() as u32);
        self.facts.push(fact);
    }

    /// The next fact that was not told of yet.
    pub(crate) fn take_event(&mut self) -> Option<DenialFact> {
        let fact = self.facts.get(self.told)?.clone();
        self.told += 1;
        Some(fact)
    }

    /// The final account, in order of first occurrence.
    pub(crate) fn into_facts(self) -> (Vec<DenialFact>, u64) {
        (self.facts, self.dropped)
    }
}

/// Hash of what [`DenialFact::repeats`] compares.
fn key(fact: &DenialFact) -> u64 {
    let mut hasher = DefaultHasher::new();
    (
        fact.operation,
        fact.pid,
        &fact.syscall,
        &fact.path,
        &fact.second_path,
        &fact.detail,
        fact.rule,
    )
        .hash(&mut hasher);
    hasher.finish()
}
