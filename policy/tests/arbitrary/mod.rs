//! Strategies for every message of the wire and the plan. Boxed where they nest: unboxed, one of them is larger than a test's stack.
#![allow(dead_code)]

use dsh_policy::bytes::ByteString;
use dsh_policy::denial::{Errno, Operation, Rule};
use dsh_policy::error::ErrorCode;
use dsh_policy::explain::PathAnswer;
use dsh_policy::mode::{EnforcementLevel, Guarantee, Lifetime, Network, SandboxMode, Tier, TmpKind};
use dsh_policy::plan::{Confinement, ExitStatus, Failure, FromHelper, Plan, Report, Step, ToHelper};
use dsh_policy::probe::{ProbeReport, TierReport};
use dsh_policy::request::{EnvMap, TerminalSize};
use dsh_policy::result::{ConfinedReport, EnvironmentReport, SandboxReport, StreamResult, Unenforced, Usage};
use dsh_policy::task::{Cursor, TaskInfo, TaskOutput, TaskStatus, WaitFor};
use dsh_policy::wire::{ClientMessage, DaemonStatus, ServerMessage, StreamName};
use dsh_policy::{BashExecRequest, BashExecSpec, BashRunResult, DenialFact, ExecError, PolicyRequest, SandboxPolicy};
use proptest::collection::{btree_map, vec};
use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::select;

pub(crate) fn one<T: Copy + std::fmt::Debug + 'static>(all: &'static [T]) -> impl Strategy<Value = T> {
    select(all)
}

pub(crate) fn bytes() -> impl Strategy<Value = ByteString> {
    prop_oneof![
        ".{0,12}".prop_map(ByteString::from),
        vec(any::<u8>(), 0..12).prop_map(ByteString::from)
    ]
}

pub(crate) fn many() -> impl Strategy<Value = Vec<ByteString>> {
    vec(bytes(), 0..4)
}

pub(crate) fn env_map() -> impl Strategy<Value = EnvMap> {
    let name = prop_oneof![
        bytes(),
        bytes().prop_map(|name| [b"base64:", name.as_bytes()].concat().into())
    ];
    btree_map(name, bytes(), 0..4)
}

fn text() -> impl Strategy<Value = String> {
    ".{0,12}"
}

prop_compose! {
    pub(crate) fn policy_request()(
        mode in of(one(SandboxMode::ALL)), workspace_root in of(bytes()), writable in many(), protect in many(),
        deny_read in many(), allow_unix_socket in many(), network in of(one(Network::ALL)), tmp in of(one(TmpKind::ALL)),
    ) -> PolicyRequest {
        PolicyRequest { mode, workspace_root, writable, protect, deny_read, allow_unix_socket, network, tmp }
    }
}

fn size() -> impl Strategy<Value = TerminalSize> {
    any::<(u16, u16)>().prop_map(|(rows, cols)| TerminalSize { rows, cols })
}

prop_compose! {
    pub(crate) fn request()(
        command in bytes(), workdir in of(bytes()), timeout_ms in any::<Option<u64>>(), stdout_max_bytes in any::<Option<u64>>(),
        stdin in of(bytes()), stdin_open in any::<bool>(), env in of(env_map()), dsh_env in of(env_map()),
    )(
        sandbox_policy in of(policy_request().boxed()), session in of(text()), ambient_env in of(env_map()), umask in any::<Option<u32>>(),
        background in any::<bool>(), lifetime in of(one(Lifetime::ALL)), description in of(text()), tty in of(size()),
        command in Just(command), workdir in Just(workdir), numbers in Just((timeout_ms, stdout_max_bytes, stdin_open)),
        stdin in Just(stdin), env in Just(env), dsh_env in Just(dsh_env),
    ) -> BashExecRequest {
        let (timeout_ms, stdout_max_bytes, stdin_open) = numbers;
        let ambient_removed = env.iter().flatten().map(|(name, _)| name.clone()).collect();
        BashExecRequest {
            command, workdir, timeout_ms, stdout_max_bytes, stdin, stdin_open, env, dsh_env, sandbox_policy, session, ambient_env, ambient_removed,
            umask, background, lifetime, description, tty,
        }
    }
}

prop_compose! {
    pub(crate) fn policy()(
        mode in one(SandboxMode::ALL), requested_mode in of(one(SandboxMode::ALL)), workspace_root in bytes(), writable in many(),
        protect in many(), protect_git in any::<bool>(), deny_read in many(), allow_unix_socket in many(),
        network in one(Network::ALL), requested_network in of(one(Network::ALL)), tmp in one(TmpKind::ALL),
        require in vec(one(Guarantee::ALL), 0..3),
    ) -> SandboxPolicy {
        SandboxPolicy {
            mode, requested_mode, workspace_root, writable, protect, protect_git, deny_read, allow_unix_socket, network,
            requested_network, tmp, require,
        }
    }
}

prop_compose! {
    pub(crate) fn spec()(
        command in bytes(), workdir in bytes(), timeout_ms in any::<u64>(), stdout_max_bytes in any::<u64>(),
        sandbox_policy in policy().boxed(), umask in any::<u32>(), lifetime in one(Lifetime::ALL), session in of(text()), tty in of(size()),
    ) -> BashExecSpec {
        BashExecSpec { command, workdir, timeout_ms, stdout_max_bytes, sandbox_policy, umask, lifetime, tty, session }
    }
}

prop_compose! {
    pub(crate) fn fact()(
        operation in one(Operation::ALL), syscall in text(), path in of(bytes()), given in of(bytes()), second_path in of(bytes()),
        detail in of(text()), errno in one(Errno::ALL), rule in one(Rule::ALL), pid in any::<u32>(),
        parents in vec(any::<u32>(), 0..3), executable in of(bytes()), counts in any::<(u64, u64, u64)>(),
    )(
        allowed_by in of(text()), names in Just((operation, syscall, errno, rule)), paths in Just((path, given, second_path, executable)),
        detail in Just(detail), pids in Just((pid, parents)), counts in Just(counts),
    ) -> DenialFact {
        let (operation, syscall, errno, rule) = names;
        let (path, given, second_path, executable) = paths;
        let (pid, parents) = pids;
        let (count, first_ms, last_ms) = counts;
        DenialFact {
            operation, syscall, path, given, second_path, detail, errno, rule, pid, parents, executable, count, first_ms, last_ms,
            allowed_by,
        }
    }
}

prop_compose! {
    fn unenforced()(guarantee in one(Guarantee::ALL), reason in text()) -> Unenforced {
        Unenforced { guarantee, reason }
    }
}

prop_compose! {
    fn confined()(
        enforcement in one(EnforcementLevel::ALL), unenforced in vec(unenforced(), 0..3), tier in one(Tier::ALL),
        network in one(Network::ALL), requested_mode in of(one(SandboxMode::ALL)), observed in any::<bool>(),
        unobserved_reason in of(text()), denials in vec(fact().boxed(), 0..3), denials_dropped in any::<u64>(),
    ) -> ConfinedReport {
        ConfinedReport {
            enforcement, unenforced, tier, network, requested_mode, observed, unobserved_reason, denials, denials_dropped,
        }
    }
}

prop_compose! {
    fn stream()(
        text in text(), truncated in any::<bool>(), bytes in any::<u64>(), spill_path in of(bytes()), raw in of(bytes()),
    ) -> StreamResult {
        StreamResult { text, truncated, bytes, spill_path, raw }
    }
}

prop_compose! {
    fn usage()(numbers in any::<(u64, u64, u64, u64)>()) -> Usage {
        Usage { wall_ms: numbers.0, user_ms: numbers.1, system_ms: numbers.2, max_rss_kib: numbers.3 }
    }
}

prop_compose! {
    pub(crate) fn result()(
        exit_code in any::<Option<i32>>(), signal in of(text()), timed_out in any::<bool>(), aborted in any::<bool>(),
        timeout_ms in any::<u64>(), stdout in stream().boxed(), stderr in stream().boxed(), mode in one(SandboxMode::ALL),
        denied in any::<Option<bool>>(), confined in confined().boxed(), removed in many(), rest in (any::<u32>(), usage()),
    ) -> BashRunResult {
        BashRunResult {
            exit_code, signal, timed_out, aborted, timeout_ms, stdout, stderr,
            sandbox: SandboxReport { mode, denied, confined: mode.confines().then_some(confined) },
            environment: EnvironmentReport { removed },
            survivors: rest.0,
            usage: rest.1,
        }
    }
}

prop_compose! {
    fn error()(code in one(ErrorCode::ALL), message in text()) -> ExecError {
        ExecError { code, message }
    }
}

prop_compose! {
    fn tier_report()(tier in one(Tier::ALL), usable in any::<bool>(), reason in of(text()), unenforced in vec(unenforced(), 0..2)) -> TierReport {
        TierReport { tier, usable, reason, unenforced }
    }
}

prop_compose! {
    fn probe()(
        kernel in text(), arch in text(), lsm in of(text()), landlock_abi in any::<u32>(), flags in any::<[bool; 3]>(),
        reasons in [of(text()), of(text())], tiers in vec(tier_report(), 0..3), advice in vec(text(), 0..3),
    ) -> ProbeReport {
        let [seccomp_notify_reason, user_namespaces_reason] = reasons;
        ProbeReport {
            kernel, arch, lsm, landlock_abi, seccomp_filter: flags[0], seccomp_notify: flags[1], seccomp_notify_reason,
            user_namespaces: flags[2], user_namespaces_reason, tiers, advice,
        }
    }
}

prop_compose! {
    fn status()(
        server in text(), pid in any::<u32>(), uptime_ms in any::<u64>(), running in any::<u32>(), connections in any::<u32>(),
        finished in any::<u64>(), failed in any::<u64>(), socket in bytes(), tier in of(one(Tier::ALL)), rest in any::<(u32, bool)>(),
    ) -> DaemonStatus {
        let (tasks, draining) = rest;
        DaemonStatus { server, pid, uptime_ms, running, tasks, connections, finished, failed, socket, tier, draining }
    }
}

fn task_status() -> impl Strategy<Value = TaskStatus> {
    prop_oneof![
        Just(TaskStatus::Running),
        any::<i32>().prop_map(|exit_code| TaskStatus::Completed { exit_code }),
        of(text()).prop_map(|signal| TaskStatus::Killed { signal }),
        text().prop_map(|reason| TaskStatus::Failed { reason }),
    ]
}

prop_compose! {
    fn task()(task in text(), kind in text(), label in text(), session in of(text()), lifetime in one(Lifetime::ALL), status in task_status()) -> TaskInfo {
        TaskInfo { task, kind, label, session, lifetime, status }
    }
}

prop_compose! {
    fn task_output()(
        info in task(), stdout in bytes(), stderr in bytes(), next in cursor(), flags in any::<[bool; 2]>(), spill_paths in many(),
        mode in one(SandboxMode::ALL), result in of(result().boxed()),
    ) -> TaskOutput {
        let [lossy, runner_failed] = flags;
        TaskOutput { info, stdout, stderr, next, lossy, spill_paths, mode, runner_failed, result: result.map(Box::new) }
    }
}

fn cursor() -> impl Strategy<Value = Cursor> {
    any::<(u64, u64)>().prop_map(|(stdout, stderr)| Cursor { stdout, stderr })
}

fn about_tasks() -> impl Strategy<Value = ClientMessage> {
    let (id, session) = (any::<u64>, || of(text()));
    prop_oneof![
        (id(), request().boxed()).prop_map(|(id, request)| ClientMessage::Start {
            id,
            request: Box::new(request)
        }),
        (
            id(),
            session(),
            text(),
            of(cursor()),
            one(WaitFor::ALL),
            any::<Option<u64>>()
        )
            .prop_map(
                |(id, session, task, cursor, wait, timeout_ms)| ClientMessage::TaskRead {
                    id,
                    session,
                    task,
                    cursor,
                    wait,
                    timeout_ms,
                }
            ),
        (id(), request().boxed(), many()).prop_map(|(id, request, paths)| ClientMessage::Explain {
            id,
            request: Box::new(request),
            paths
        }),
        (id(), session()).prop_map(|(id, session)| ClientMessage::TaskList { id, session }),
        (id(), session(), text(), of(text())).prop_map(|(id, session, task, reason)| ClientMessage::TaskKill {
            id,
            session,
            task,
            reason,
        }),
        (id(), text()).prop_map(|(id, session)| ClientMessage::SessionEnd { id, session }),
        (id(), session()).prop_map(|(id, session)| ClientMessage::Notices { id, session }),
    ]
}

pub(crate) fn client_message() -> impl Strategy<Value = ClientMessage> {
    let id = any::<u64>;
    prop_oneof![
        (id(), request().boxed(), any::<bool>()).prop_map(|(id, request, stream)| ClientMessage::Run {
            id,
            request: Box::new(request),
            stream
        }),
        (id(), bytes(), any::<bool>()).prop_map(|(id, data, eof)| ClientMessage::Stdin { id, data, eof }),
        (id(), size()).prop_map(|(id, size)| ClientMessage::Resize { id, size }),
        id().prop_map(|id| ClientMessage::Cancel { id }),
        (id(), request().boxed()).prop_map(|(id, request)| ClientMessage::Resolve {
            id,
            request: Box::new(request)
        }),
        id().prop_map(|id| ClientMessage::Status { id }),
        id().prop_map(|id| ClientMessage::Probe { id }),
        id().prop_map(|id| ClientMessage::Config { id }),
        about_tasks().boxed(),
    ]
}

pub(crate) fn server_message() -> impl Strategy<Value = ServerMessage> {
    let id = any::<u64>;
    prop_oneof![
        (id(), any::<u32>(), spec().boxed()).prop_map(|(id, pid, spec)| ServerMessage::Started {
            id,
            pid,
            spec: Box::new(spec)
        }),
        (id(), one(StreamName::ALL), any::<u64>(), bytes()).prop_map(|(id, stream, offset, data)| {
            ServerMessage::Output {
                id,
                stream,
                offset,
                data,
            }
        }),
        (id(), fact().boxed()).prop_map(|(id, fact)| ServerMessage::Denial {
            id,
            fact: Box::new(fact)
        }),
        (id(), result().boxed()).prop_map(|(id, result)| ServerMessage::Finished {
            id,
            result: Box::new(result)
        }),
        (any::<Option<u64>>(), error().boxed()).prop_map(|(id, error)| ServerMessage::Error { id, error }),
        (id(), spec().boxed()).prop_map(|(id, spec)| ServerMessage::Resolved {
            id,
            spec: Box::new(spec)
        }),
        (id(), status().boxed()).prop_map(|(id, status)| ServerMessage::Status {
            id,
            status: Box::new(status)
        }),
        (id(), probe().boxed()).prop_map(|(id, report)| ServerMessage::Probe {
            id,
            report: Box::new(report)
        }),
        (id(), text(), bytes()).prop_map(|(id, toml, path)| ServerMessage::Config { id, toml, path }),
        (id(), bytes()).prop_map(|(id, path)| ServerMessage::Explained {
            id,
            paths: vec![PathAnswer {
                path,
                operations: vec![]
            }]
        }),
        any::<(u64, u64)>().prop_map(|(id, bytes)| ServerMessage::InputTaken { id, bytes }),
        (id(), task().boxed()).prop_map(|(id, task)| ServerMessage::TaskStarted { id, task }),
        (id(), task_output().boxed()).prop_map(|(id, output)| ServerMessage::TaskOutput {
            id,
            output: Box::new(output)
        }),
        (id(), vec(task().boxed(), 0..3)).prop_map(|(id, tasks)| ServerMessage::Tasks { id, tasks }),
        (id(), task().boxed()).prop_map(|(id, task)| ServerMessage::TaskKilled { id, task }),
        any::<(u64, u32)>().prop_map(|(id, tasks)| ServerMessage::SessionEnded { id, tasks }),
        (id(), task().boxed()).prop_map(|(id, task)| ServerMessage::Notice { id, task }),
    ]
}

prop_compose! {
    pub(crate) fn confinement()(
        mode in one(SandboxMode::ALL), tier in one(Tier::ALL), writable in many(), devices in many(), protect in many(),
        protect_git in any::<bool>(), deny_read in many(), allow_unix_socket in many(), network in one(Network::ALL),
        private_tmp_root in of(bytes()), require in vec(one(Guarantee::ALL), 0..3),
    ) -> Confinement {
        Confinement {
            mode, tier, writable, devices, protect, protect_git, deny_read, allow_unix_socket, network, require,
            private_tmp_root,
        }
    }
}

prop_compose! {
    fn plan()(
        build in text(), shell in bytes(), command in bytes(), env in vec((bytes(), bytes()), 0..4), workdir in bytes(),
        umask in any::<u32>(), confinement in of(confinement().boxed()), private_tmp in of(bytes()), graces in any::<[u64; 3]>(),
        max_denials in any::<u32>(), lifetime in one(Lifetime::ALL), terminal in any::<bool>(),
    ) -> Plan {
        Plan {
            build, shell, command, env, workdir, umask, confinement, private_tmp, kill_grace_ms: graces[0],
            drain_grace_ms: graces[1], setup_deadline_ms: graces[2], max_denials, lifetime, terminal,
        }
    }
}

pub(crate) fn to_helper() -> impl Strategy<Value = ToHelper> {
    prop_oneof![
        plan().boxed().prop_map(|plan| ToHelper::Run(Box::new(plan))),
        Just(ToHelper::Terminate),
        Just(ToHelper::Kill)
    ]
}

fn exit_status() -> impl Strategy<Value = ExitStatus> {
    prop_oneof![
        any::<i32>().prop_map(ExitStatus::Code),
        any::<i32>().prop_map(ExitStatus::Signal)
    ]
}

prop_compose! {
    fn report()(
        status in exit_status(), terminated in any::<bool>(), denials in vec(fact().boxed(), 0..3), denials_dropped in any::<u64>(),
        survivors in any::<u32>(), usage in usage(),
    ) -> Report {
        Report { status, terminated, denials, denials_dropped, survivors, usage }
    }
}

pub(crate) fn from_helper() -> impl Strategy<Value = FromHelper> {
    prop_oneof![
        text().prop_map(|build| FromHelper::Ready { build }),
        (any::<u32>(), vec(unenforced(), 0..3), of(text())).prop_map(|(pid, unenforced, unobserved)| {
            FromHelper::Started {
                pid,
                unenforced,
                unobserved,
            }
        }),
        fact().boxed().prop_map(|fact| FromHelper::Denial(Box::new(fact))),
        exit_status().prop_map(FromHelper::ShellExited),
        report()
            .boxed()
            .prop_map(|report| FromHelper::Finished(Box::new(report))),
        (any::<i32>(), text()).prop_map(|(errno, detail)| FromHelper::Failed(Failure {
            step: Step::Landlock,
            errno,
            detail
        })),
        probe().boxed().prop_map(|probe| FromHelper::Probed(Box::new(probe))),
    ]
}
