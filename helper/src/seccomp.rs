//! The seccomp program of a plan: what the supervisor is asked about, and what has a constant answer.
use std::collections::BTreeMap;

use dsh_policy::mode::{Network, SandboxMode, Tier};
use dsh_policy::plan::Confinement;
use libc::sock_filter;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::bpf::{Action, Leaf, When, assemble};
use crate::calls::{self, Call, Class, Scope};
use crate::sys;

/// Calls that do not exist for confined commands because their arguments lie in memory, where no filter sees them: `clone3` (its flags) and
/// `openat2` (likewise). Every program that uses them falls back to the older call, so they are no refusals and no facts.
const ABSENT: [i64; 2] = [libc::SYS_clone3, libc::SYS_openat2];

/// Whether refusals can be observed, which decides who answers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Observation {
    /// The supervisor answers, and records.
    Listener,
    /// No listener can be had: what nobody else enforces gets a constant answer, and nothing is recorded. The flag says whether Landlock confines signals.
    Blind {
        /// Landlock confines signals.
        signals_scoped: bool,
    },
}

/// Which part of the table of calls a confinement needs.
pub(crate) fn scope(confinement: &Confinement) -> Scope {
    Scope {
        sockets: confinement.network != Network::Full,
        reads: !confinement.deny_read.is_empty(),
        sends: sys::can_take_descriptors(),
        ipc: confinement.tier == Tier::Landlock,
    }
}

/// The program that most plans need, built while the helper waits for one.
pub(crate) struct Prebuilt {
    scope: Scope,
    program: Vec<sock_filter>,
}

impl Prebuilt {
    /// For the default network and no hidden paths; with a listener nothing else of a plan matters.
    pub(crate) fn new(tier: Tier) -> Self {
        let scope = Scope {
            sockets: false,
            reads: false,
            sends: sys::can_take_descriptors(),
            ipc: tier == Tier::Landlock,
        };
        let leaves = leaves(scope, SandboxMode::WorkspaceWrite, Observation::Listener);
        // An error comes again, with its step, when the plan's own program is built.
        Self {
            scope,
            program: program(leaves).unwrap_or_default(),
        }
    }

    /// The program itself, for a child that is prepared before there is a plan.
    pub(crate) fn program(&self) -> &[sock_filter] {
        &self.program
    }

    /// Whether the program is the one that this confinement needs.
    pub(crate) fn fits(&self, confinement: &Confinement) -> bool {
        self.scope == scope(confinement) && !self.program.is_empty()
    }

    /// The program, when it is the one that this confinement needs.
    pub(crate) fn for_plan(&self, confinement: &Confinement, observation: Observation) -> Option<Vec<sock_filter>> {
        let fits = observation == Observation::Listener && self.fits(confinement);
        fits.then(|| self.program.clone())
    }
}

/// Builds the program. An error of `seccompiler` can only be a fault of the table above.
pub(crate) fn build(
    confinement: &Confinement,
    observation: Observation,
) -> Result<Vec<sock_filter>, seccompiler::Error> {
    program(leaves(scope(confinement), confinement.mode, observation))
}

fn program(leaves: Vec<Leaf>) -> Result<Vec<sock_filter>, seccompiler::Error> {
    let constant: BpfProgram = SeccompFilter::new(
        BTreeMap::from(ABSENT.map(|number| (number, Vec::new()))),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::ENOSYS.cast_unsigned()),
        std::env::consts::ARCH.try_into().map_err(seccompiler::Error::Backend)?,
    )
    .and_then(BpfProgram::try_from)
    .map_err(seccompiler::Error::Backend)?;
    let rest: Vec<sock_filter> = constant
        .iter()
        .map(|i| sock_filter {
            code: i.code,
            jt: i.jt,
            jf: i.jf,
            k: i.k,
        })
        .collect();
    Ok(assemble(leaves, &rest))
}

fn leaves(scope: Scope, mode: SandboxMode, observation: Observation) -> Vec<Leaf> {
    let mut leaves: BTreeMap<i64, Leaf> = BTreeMap::new();
    for call in calls::entries(scope) {
        let Some(action) = action(call, mode, observation) else {
            continue;
        };
        let leaf = leaves.entry(call.number).or_insert_with(|| Leaf {
            number: u32::try_from(call.number).unwrap_or(u32::MAX),
            tests: Vec::new(),
        });
        leaf.tests.push((call.when, action));
    }
    let refused = match observation {
        Observation::Listener => Action::Notify,
        Observation::Blind { .. } => Action::Errno(libc::EPERM),
    };
    let injection = (When::OneOf(1, calls::TERMINAL_INJECTION), refused);
    leaves
        .entry(libc::SYS_ioctl)
        .or_insert_with(|| Leaf {
            number: libc::SYS_ioctl as u32,
            tests: Vec::new(),
        })
        .tests
        .push(injection);
    leaves.into_values().collect()
}

/// What a matching call gets; none when it is permitted because another layer enforces it or nobody can.
fn action(call: &Call, mode: SandboxMode, observation: Observation) -> Option<Action> {
    let Observation::Blind { signals_scoped } = observation else {
        return Some(Action::Notify);
    };
    match call.class {
        Class::Closed(operation) => Some(Action::Errno(operation.errno().number())),
        // Arguments that name one's own process by number are refused too: without a supervisor nobody can tell.
        Class::Process => Some(Action::Errno(libc::EPERM)),
        Class::Signal if !signals_scoped => Some(Action::Errno(libc::EPERM)),
        Class::Metadata if mode == SandboxMode::ReadOnly => Some(Action::Errno(libc::EPERM)),
        Class::Socket => Some(Action::Errno(libc::EACCES)),
        Class::Metadata
        | Class::File
        | Class::Access
        | Class::Read
        | Class::Signal
        | Class::Address
        | Class::Datagram => None,
    }
}
