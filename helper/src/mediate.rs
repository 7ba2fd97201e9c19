//! Answers parked calls: finds the call in the table, has it judged by its class, records refusals.
//!
//! Three rules keep this sound against a program that changes its memory meanwhile. A refusal is always safe: the call does not happen. A call is let
//! through only where Landlock enforces the same rule on the real object. Everything else is done by the supervisor itself, on an object that it has
//! pinned and judged; then every outcome, also a failure, is answered and never let through.
use std::rc::Rc;

use dsh_policy::DenialFact;
use dsh_policy::decide::{Verdict, socket, write_with};
use dsh_policy::denial::{Operation, Rule};
use dsh_policy::mode::{Guarantee, Network, SandboxMode};
use dsh_policy::plan::Confinement;
use dsh_policy::result::Unenforced;
use rustix::io::Errno;

use crate::calls::{self, Call, Class};
use crate::facts::{Ledger, Refusal};
use crate::object::{Found, View};
use crate::reach::{self, Sockets};
use crate::repositories::Repositories;
use crate::sys::{self, Answer, Listener, Notification};
use crate::world::World;
use crate::{address, emulate, files, process, terminals};

/// What becomes of a parked call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// This.
    Answer(Answer),
    /// The sandbox says no.
    Refuse(Refusal),
}

impl Decision {
    /// The kernel goes on.
    pub(crate) const CONTINUE: Self = Self::Answer(Answer::Continue);

    /// The call fails as it would have anyway.
    pub(crate) fn fail(errno: Errno) -> Self {
        Self::Answer(Answer::Fail(errno.raw_os_error()))
    }
}

/// One parked call on its way to a decision.
pub(crate) struct Parked<'a> {
    /// Its entry in the table.
    pub(crate) call: &'a Call,
    /// Its arguments.
    pub(crate) args: [u64; 6],
    /// Its file system.
    pub(crate) view: View<'a>,
    /// Its identity, for answers that bring a descriptor.
    pub(crate) id: u64,
    /// Where it is parked.
    pub(crate) listener: &'a Listener,
}

impl Parked<'_> {
    /// An argument that the kernel takes for an `int`.
    pub(crate) fn int(&self, index: usize) -> i32 {
        self.args[index] as i32
    }

    /// An argument that the kernel takes for an `unsigned int`.
    pub(crate) fn bits(&self, index: usize) -> u32 {
        self.args[index] as u32
    }
}

impl Parked<'_> {
    /// Whether the call reads, and the policy hides things from reading.
    pub(crate) fn reads(&self, judge: &Judge) -> bool {
        !judge.confinement.deny_read.is_empty() && matches!(self.call.class, Class::File | Class::Read)
    }
}

/// The policy, and what this user could do without it.
pub(crate) struct Judge {
    /// Where the command runs.
    pub(crate) world: Rc<World>,
    /// The rules.
    pub(crate) confinement: Confinement,
    /// Which repositories are old.
    pub(crate) repositories: Repositories,
    /// The user has the powers of root when not confined.
    pub(crate) privileged: bool,
    /// The command's sockets.
    pub(crate) sockets: Sockets,
}

impl Judge {
    /// Whether `operation` on the object called `path` is refused, and by which rule.
    pub(crate) fn refuses(&self, operation: Operation, path: &[u8]) -> Option<Rule> {
        match write_with(&self.confinement, operation, path, &self.repositories) {
            Verdict::Allow => None,
            Verdict::Refuse(rule) => Some(rule),
        }
    }

    /// The rule for a call whose object could not be seen.
    pub(crate) fn blind_rule(&self) -> Rule {
        match self.confinement.mode {
            SandboxMode::ReadOnly => Rule::ReadOnlyMode,
            _ => Rule::OutsideWritableRoots,
        }
    }
}

/// A refusal of `operation` on `found`.
pub(crate) fn refusal(operation: Operation, rule: Rule, found: Found, given: Vec<u8>) -> Decision {
    Decision::Refuse(Refusal {
        operation,
        rule,
        path: Some(found.path),
        given: Some(given),
        second: None,
        detail: None,
    })
}

/// The supervisor's judgement of one command.
pub(crate) struct Mediator {
    judge: Judge,
    limit: u32,
    ledger: Option<Ledger>,
}

impl Mediator {
    /// For a command that has not been forked yet.
    pub(crate) fn new(confinement: Confinement, world: Rc<World>, limit: u32, privileged: bool) -> Self {
        Self {
            judge: Judge {
                confinement,
                repositories: Repositories::new(Rc::clone(&world)),
                world,
                privileged,
                sockets: Sockets::new(),
            },
            limit,
            ledger: None,
        }
    }

    /// The shell was forked: from now on refusals are facts. The set-up itself makes no call that would be one.
    pub(crate) fn started(mut self, shell: i32) -> Self {
        self.ledger = Some(Ledger::new(shell, self.limit));
        self
    }

    /// Answers one parked call. An error means that none can be received here at all.
    pub(crate) fn serve(&mut self, listener: &Listener) -> std::io::Result<()> {
        match listener.receive() {
            Ok(notification) => self.decide(listener, &notification),
            // The caller died before it was looked at, or a signal came.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR | libc::EAGAIN)) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn decide(&mut self, listener: &Listener, notification: &Notification) {
        let id = notification.id;
        let Some(call) = calls::find(i64::from(notification.data.nr)) else {
            return listener.answer(id, Answer::Fail(libc::ENOSYS));
        };
        let view = View {
            thread: notification.pid.cast_signed(),
            world: &self.judge.world,
        };
        self.judge.sockets.heard_of(view.thread);
        let parked = Parked {
            call,
            args: notification.data.args,
            view,
            id,
            listener,
        };
        match judge(&self.judge, &parked) {
            // Harmless even for a caller that is gone: Landlock is underneath.
            Decision::Answer(answer) => listener.answer(id, answer),
            Decision::Refuse(refusal) => {
                let errno = refusal.operation.errno().number();
                // Only now: everything that was read came from this caller if it still waits.
                if listener.is_waiting(id)
                    && let Some(ledger) = &mut self.ledger
                {
                    ledger.record(view.thread, call.name, refusal, &self.judge.confinement);
                }
                listener.answer(id, Answer::Fail(errno));
            }
        }
    }

    /// The next refusal that was not told of yet.
    pub(crate) fn take_event(&mut self) -> Option<DenialFact> {
        self.ledger.as_mut()?.take_event()
    }

    /// Every refusal, and how many were not kept.
    pub(crate) fn into_facts(self) -> (Vec<DenialFact>, u64) {
        self.ledger.map(Ledger::into_facts).unwrap_or_default()
    }
}

fn judge(judge: &Judge, parked: &Parked<'_>) -> Decision {
    match parked.call.class {
        Class::File | Class::Read => files::judge(judge, parked),
        Class::Metadata if terminals::is_injection(parked) => terminals::judge_injection(parked),
        Class::Metadata => emulate::judge(judge, parked),
        Class::Access => files::judge_access(judge, parked),
        Class::Process | Class::Signal => process::judge(judge, parked),
        Class::Socket | Class::Datagram => judge_socket(judge, parked),
        Class::Address => address::judge(judge, parked),
        Class::Closed(operation) => process::judge_closed(judge, parked, operation),
    }
}

fn judge_socket(judge: &Judge, parked: &Parked<'_>) -> Decision {
    let (family, kind, protocol) = (parked.int(0), parked.int(1), parked.int(2));
    match socket(&judge.confinement, family, kind, protocol) {
        Verdict::Allow => match judge.sockets.make(family, kind) {
            Ok(()) => Decision::CONTINUE,
            Err(reach::StillSending) => {
                let detail = format!(
                    "{} while another thread sends",
                    address::describe_socket(family, kind, protocol)
                );
                Decision::Refuse(Refusal::of(Operation::CreateSocket, Rule::Confined, Some(detail)))
            }
        },
        Verdict::Refuse(rule) => {
            let detail = address::describe_socket(family, kind, protocol);
            Decision::Refuse(Refusal::of(Operation::CreateSocket, rule, Some(detail)))
        }
    }
}

/// What the supervisor cannot promise, with the reason. `apart` says that the command has namespaces of its own.
pub(crate) fn unenforced(confinement: &Confinement, listen: bool, apart: bool) -> Vec<Unenforced> {
    let mut missing = Vec::new();
    let mut lacks = |condition: bool, guarantee: Guarantee, reason: &str| {
        if condition {
            missing.push(Unenforced {
                guarantee,
                reason: reason.to_owned(),
            });
        }
    };
    let writes = confinement.mode != SandboxMode::ReadOnly;
    let no_listener = "no seccomp notification listener can be had here";
    lacks(!listen, Guarantee::Facts, no_listener);
    lacks(!listen && writes && !apart, Guarantee::FileMetadata, no_listener);
    let by_name = "they are refused by name before the kernel looks again, so a program that races with itself can win";
    let protects = confinement.protect_git || !confinement.protect.is_empty();
    lacks(writes && protects, Guarantee::ProtectedPaths, by_name);
    lacks(!confinement.deny_read.is_empty(), Guarantee::DenyRead, by_name);
    let pins = sys::can_take_descriptors();
    lacks(!listen, Guarantee::UnixSockets, no_listener);
    lacks(
        listen && !pins,
        Guarantee::UnixSockets,
        "without pidfd_getfd, which this kernel or an outer filter refuses, connect and sendto are refused by name only: not sendmsg, and not to a program that races with itself",
    );
    lacks(
        confinement.network == Network::Loopback && !apart,
        Guarantee::Network,
        if pins {
            "without a network namespace the services of the host on loopback stay reachable"
        } else {
            "without a network namespace the services of the host on loopback stay reachable, and without pidfd_getfd the network by sendmsg too"
        },
    );
    missing
}
