//! What holds for every request, every environment and every path.
#![allow(clippy::unwrap_used)]

mod arbitrary;
mod tree;

use std::path::Path;
use std::sync::LazyLock;

use arbitrary::one;
use dsh_policy::decide::{self, Verdict, is_within};
use dsh_policy::denial::Operation;
use dsh_policy::environment::{self, ChildEnvironment, EnvironmentRules};
use dsh_policy::git::{Candidate, RepositoryView};
use dsh_policy::mode::{Guarantee, Network, Tier, TmpKind};
use dsh_policy::plan::Confinement;
use dsh_policy::request::EnvMap;
use dsh_policy::resolve::{PlanInputs, Surroundings, compile, resolve};
use dsh_policy::{BashExecRequest, BashExecSpec, ByteString, Deployment, ExecError, PolicyRequest, SandboxMode};
use proptest::collection::{btree_map, vec};
use proptest::option::of;
use proptest::prelude::*;
use proptest::sample::select;
use tree::Tree;

static TREE: LazyLock<Tree> = LazyLock::new(Tree::new);

fn in_tree() -> impl Strategy<Value = ByteString> {
    select(
        &[
            "",
            "work",
            "work/sub",
            "work/link",
            "work/link/..",
            "far",
            "far/deep",
            "home",
            "work/with space\nand line",
        ][..],
    )
    .prop_map(|name| TREE.path(name))
}

fn maybe_missing() -> impl Strategy<Value = ByteString> {
    prop_oneof![
        in_tree(),
        select(&["work/none", "work/link/none", "none/../work", "work/file"][..]).prop_map(|name| TREE.path(name)),
        select(&["~/.ssh", "~", "/proc/self", "/"][..]).prop_map(ByteString::from),
    ]
}

fn relative_or_not() -> impl Strategy<Value = ByteString> {
    prop_oneof![
        maybe_missing(),
        select(&["sub", "link", "link/..", ".", "..", "file", ".env"][..]).prop_map(ByteString::from)
    ]
}

prop_compose! {
    fn policy_request()(
        mode in of(one(SandboxMode::ALL)), workspace_root in of(in_tree()), writable in vec(in_tree(), 0..3),
        protect in vec(relative_or_not(), 0..3), deny_read in vec(maybe_missing(), 0..3), allow_unix_socket in vec(maybe_missing(), 0..2),
        network in of(one(Network::ALL)), tmp in of(one(TmpKind::ALL)),
    ) -> PolicyRequest {
        PolicyRequest { mode, workspace_root, writable, protect, deny_read, allow_unix_socket, network, tmp }
    }
}

prop_compose! {
    fn request()(
        workdir in of(relative_or_not()), timeout_ms in of(1u64..2_000_000), stdout_max_bytes in any::<Option<u64>>(),
        sandbox_policy in of(policy_request().boxed()), umask in any::<Option<u32>>(), background in any::<bool>(), session in of("s[0-9]"),
    ) -> BashExecRequest {
        BashExecRequest {
            command: "true".into(), workdir, timeout_ms, stdout_max_bytes, sandbox_policy, umask, background, session,
            ..BashExecRequest::default()
        }
    }
}

prop_compose! {
    fn deployment()(
        modes in [one(SandboxMode::ALL), one(SandboxMode::ALL)], network in one(Network::ALL), tmp in one(TmpKind::ALL),
        writable_bounds in of(vec(in_tree(), 0..3)), protect in vec(relative_or_not(), 0..2), deny_read in vec(maybe_missing(), 0..2),
        allow_unix_socket in vec(maybe_missing(), 0..2), require in vec(one(Guarantee::ALL), 0..2), workdir in of(in_tree()),
        numbers in [1u64..1_000_000, 1u64..1_000_000, 1u64..1_000_000, 1u64..1_000_000], protect_git in any::<bool>(),
    ) -> Deployment {
        Deployment {
            default_mode: modes[0], max_mode: modes[1], network, tmp, writable_bounds, protect, deny_read, allow_unix_socket, require,
            workdir, default_timeout_ms: numbers[0], max_timeout_ms: numbers[1], kept_bytes: numbers[2], max_kept_bytes: numbers[3],
            protect_git, ..Deployment::default()
        }
    }
}

fn resolved(request: &BashExecRequest, deployment: &Deployment) -> Result<BashExecSpec, ExecError> {
    resolve(
        request,
        deployment,
        Surroundings {
            home: Some(&TREE.home),
            daemon_workdir: &TREE.root,
        },
    )
}

/// The request that asks for exactly what a spec says.
fn asking_for(spec: &BashExecSpec) -> BashExecRequest {
    let policy = spec.sandbox_policy.clone();
    BashExecRequest {
        command: spec.command.clone(),
        workdir: Some(spec.workdir.clone()),
        timeout_ms: Some(spec.timeout_ms),
        stdout_max_bytes: Some(spec.stdout_max_bytes),
        sandbox_policy: Some(PolicyRequest {
            mode: Some(policy.requested_mode.unwrap_or(policy.mode)),
            workspace_root: Some(policy.workspace_root),
            writable: policy.writable,
            protect: policy.protect,
            deny_read: policy.deny_read,
            allow_unix_socket: policy.allow_unix_socket,
            network: Some(policy.requested_network.unwrap_or(policy.network)),
            tmp: Some(policy.tmp),
        }),
        session: spec.session.clone(),
        umask: Some(spec.umask),
        lifetime: Some(spec.lifetime),
        ..BashExecRequest::default()
    }
}

fn covers(list: &[ByteString], path: &Path) -> bool {
    list.iter().any(|root| path.starts_with(root.as_path()))
}

proptest! {
    #[test]
    fn resolving_what_was_resolved_changes_nothing(request in request(), deployment in deployment()) {
        if let Ok(spec) = resolved(&request, &deployment) {
            prop_assert_eq!(resolved(&asking_for(&spec), &deployment), Ok(spec));
        }
    }

    #[test]
    fn no_request_widens_what_the_deployment_allows(request in request(), deployment in deployment()) {
        let Ok(spec) = resolved(&request, &deployment) else { return Ok(()) };
        let policy = &spec.sandbox_policy;
        prop_assert!(policy.mode <= deployment.max_mode && policy.network <= deployment.network && policy.tmp <= deployment.tmp);
        prop_assert!(spec.timeout_ms <= deployment.max_timeout_ms);
        prop_assert!(spec.stdout_max_bytes <= deployment.max_kept_bytes.max(deployment.kept_bytes));
        prop_assert_eq!(&policy.require, &deployment.require);
        prop_assert_eq!(policy.protect_git, deployment.protect_git && policy.mode == SandboxMode::WorkspaceWrite);
        if let (SandboxMode::WorkspaceWrite, Some(bounds)) = (policy.mode, &deployment.writable_bounds) {
            let bounds: Vec<ByteString> = bounds.iter().map(|path| path.as_path().canonicalize().unwrap().into()).collect();
            for root in policy.writable.iter().chain([&policy.workspace_root]) {
                prop_assert!(covers(&bounds, root.as_path()), "{:?} is outside of {:?}", root, bounds);
            }
        }
        for path in deployment.deny_read.iter().filter_map(|path| path.as_path().canonicalize().ok()) {
            prop_assert!(covers(&policy.deny_read, &path), "{:?} could be read", path);
        }
        for path in &deployment.protect {
            if let Ok(path) = policy.workspace_root.as_path().join(path.as_path()).canonicalize() {
                prop_assert!(covers(&policy.protect, &path), "{:?} could be written", path);
            }
        }
    }

    #[test]
    fn a_spec_is_canonical(request in request(), deployment in deployment()) {
        let Ok(spec) = resolved(&request, &deployment) else { return Ok(()) };
        for path in spec.sandbox_policy.writable.iter().chain([&spec.workdir, &spec.sandbox_policy.workspace_root]) {
            prop_assert_eq!(&path.as_path().canonicalize().unwrap(), path.as_path());
        }
    }

    #[test]
    fn a_plan_opens_what_the_spec_says_and_nothing_else(
        request in request(), deployment in deployment(), tier in one(Tier::ALL), has_tmp in any::<bool>(),
    ) {
        let Ok(spec) = resolved(&request, &deployment) else { return Ok(()) };
        let deployment = Deployment { writable: vec![TREE.path("home"), TREE.path("not there")], ..deployment };
        let private_tmp = has_tmp.then(|| ByteString::from("/tmp/dsh-test"));
        let inputs = PlanInputs {
            shell: Path::new("/bin/bash"), tier, private_tmp: private_tmp.clone(), daemon_folders: &["/srv/daemon".into()],
            deployment: &deployment,
        };
        let environment = ChildEnvironment { variables: [("A".into(), "b".into())].into(), removed: vec![] };
        let plan = compile(&spec, environment, &inputs);
        let policy = &spec.sandbox_policy;
        prop_assert_eq!(&plan.env, &[("A".into(), "b".into()), ("PWD".into(), spec.workdir.clone())]);
        prop_assert_eq!(plan.confinement.is_none(), policy.mode == SandboxMode::DangerFullAccess);
        prop_assert_eq!(plan.private_tmp.is_some(), has_tmp && policy.mode != SandboxMode::ReadOnly);
        let Some(confinement) = plan.confinement else { return Ok(()) };
        prop_assert!(confinement.protect.contains(&"/srv/daemon".into()) && confinement.devices.contains(&"/dev/null".into()));
        if policy.mode == SandboxMode::ReadOnly {
            prop_assert!(confinement.writable.is_empty() && confinement.private_tmp_root.is_none());
            return Ok(());
        }
        let mut known = vec![policy.workspace_root.clone(), TREE.path("home"), "/dev/shm".into()];
        known.extend(policy.writable.iter().cloned().chain(private_tmp.clone()));
        let opens_tmp = policy.tmp == TmpKind::Shared || (has_tmp && tier != Tier::Landlock);
        // `..` of a tree that lies in `/tmp` is `/tmp`: a workspace like any other.
        let is_workspace = policy.workspace_root == "/tmp".into();
        prop_assert_eq!(confinement.writable.contains(&"/tmp".into()), opens_tmp || is_workspace);
        known.extend(opens_tmp.then(|| "/tmp".into()));
        for root in &confinement.writable {
            prop_assert!(known.contains(root), "{:?}", root);
        }
        for root in policy.writable.iter().chain([&policy.workspace_root]).chain(&private_tmp) {
            prop_assert!(confinement.writable.contains(root), "{:?}", root);
        }
    }
}

/// Anything up to a command's own names, secrets and harness names in every letter case.
fn name() -> impl Strategy<Value = ByteString> {
    let word = select(
        &[
            "KEY",
            "token",
            "SecrET",
            "PASSWORD",
            "DSH_",
            "dsh_",
            "AUTH",
            "PATH",
            "LANG",
            "BASH_ENV",
            "ld_preload",
        ][..],
    );
    prop_oneof![
        "[A-Za-z_]{1,8}".prop_map(ByteString::from),
        ("[A-Z_]{0,4}", word, "[a-z_]{0,4}").prop_map(|(a, b, c)| format!("{a}{b}{c}").into()),
        vec(1u8..=255, 1..6)
            .prop_filter("a name has no `=`", |name| !name.contains(&b'='))
            .prop_map(ByteString::from),
    ]
}

const NEEDLE: &str = "n33dle0123456789n33dle0123456789n33dle";

/// The needle in every shape that must be recognised by value alone.
fn secret_value() -> impl Strategy<Value = String> {
    let shapes = [
        "postgres://u:NEEDLE@h/d",
        "https://NEEDLE@h",
        "ghp_NEEDLE",
        "sk-NEEDLE",
        "Server=h;Password=NEEDLE;",
        r#"{"apiKey":"NEEDLE"}"#,
        "Authorization: Bearer NEEDLE",
        "-----BEGIN PRIVATE KEY-----\nNEEDLE",
        "postgres%3A%2F%2Fu%3ANEEDLE%40h",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.NEEDLE",
        "--db-password=NEEDLE",
    ];
    ("([a-z]{0,5} )?", select(shapes.to_vec()), "( [a-z]{0,5})?")
        .prop_map(|(before, shape, after)| format!("{before}{}{after}", shape.replace("NEEDLE", NEEDLE)))
}

fn ambient() -> impl Strategy<Value = EnvMap> {
    let value = prop_oneof![
        3 => "[ -~]{0,20}".prop_map(ByteString::from),
        1 => vec(1u8..=255, 0..20).prop_map(ByteString::from),
        2 => secret_value().prop_map(ByteString::from),
    ];
    btree_map(name(), value, 0..12)
}

fn has_word(name: &ByteString, words: &[&str]) -> bool {
    let upper = name.display().to_ascii_uppercase();
    words.iter().any(|word| upper.contains(word))
}

fn starts_like_dsh(name: &ByteString) -> bool {
    name.display().to_ascii_uppercase().starts_with("DSH_")
}

proptest! {
    #[test]
    fn no_removed_name_and_no_secret_value_survives(
        ambient in ambient(), env in btree_map(name(), "[a-z]{0,6}".prop_map(ByteString::from), 0..3),
        dsh_env in btree_map("DSH_[A-Z]{1,4}".prop_map(ByteString::from), "[a-z]{0,6}".prop_map(ByteString::from), 0..3),
    ) {
        let env: EnvMap = env.into_iter().filter(|(name, _)| !starts_like_dsh(name)).collect();
        let defaults: EnvMap = [("TMPDIR".into(), "/tmp/p".into())].into();
        let rules = EnvironmentRules::default();
        let built = environment::build(&ambient, &defaults, Some(&env), Some(&dsh_env), &rules).unwrap();
        for (name, value) in &built.variables {
            prop_assert!(!value.display().contains(NEEDLE), "{:?} is still there", name);
            prop_assert!(!built.removed.contains(name));
            let deliberate = env.contains_key(name) || dsh_env.contains_key(name) || defaults.contains_key(name);
            if !deliberate {
                prop_assert!(!has_word(name, &["KEY", "TOKEN", "SECRET", "PASSWORD"]) && !starts_like_dsh(name), "{:?}", name);
                let terminal = ["NO_COLOR", "TERM", "PAGER", "GIT_PAGER"].contains(&name.display().as_str());
                prop_assert!(terminal || ambient.get(name) == Some(value));
            }
        }
        for (name, value) in env.iter().filter(|(name, _)| !dsh_env.contains_key(*name)).chain(&dsh_env) {
            prop_assert_eq!(built.variables.get(name), Some(value));
        }
        for name in ambient.keys() {
            prop_assert!(built.variables.contains_key(name) != built.removed.contains(name), "{:?} is neither or both", name);
        }
        prop_assert!(built.removed.is_sorted());
        let shown = format!("{built:?}");
        prop_assert!(!shown.contains(NEEDLE));
    }

    #[test]
    fn scrubbing_twice_is_scrubbing_once(ambient in ambient()) {
        let rules = EnvironmentRules::default();
        let once = environment::scrub(&ambient, &rules);
        let twice = environment::scrub(&once.variables, &rules);
        prop_assert_eq!(&twice.variables, &once.variables);
        prop_assert!(twice.removed.is_empty());
    }
}

/// A canonical path of a few short components, so that relations between two are common.
fn canonical() -> impl Strategy<Value = Vec<u8>> {
    let component = select(
        &[
            "a", "b", "ab", "tmp", ".git", "hooks", "config", "x.git", "modules", "dev", "null",
        ][..],
    );
    vec(component, 0..5).prop_map(|components| format!("/{}", components.join("/")).into_bytes())
}

prop_compose! {
    fn confinement()(
        mode in select(&[SandboxMode::ReadOnly, SandboxMode::WorkspaceWrite][..]), writable in vec(canonical(), 0..3),
        protect in vec(canonical(), 0..2), deny_read in vec(canonical(), 0..2), protect_git in any::<bool>(), network in one(Network::ALL),
    ) -> Confinement {
        let list = |paths: Vec<Vec<u8>>| paths.into_iter().map(ByteString::from).collect();
        Confinement {
            mode, tier: Tier::Landlock, writable: list(writable), devices: vec!["/dev/null".into()], protect: list(protect), protect_git,
            deny_read: list(deny_read), allow_unix_socket: vec![], network, require: vec![], private_tmp_root: None,
        }
    }
}

struct NoRepository;
impl RepositoryView for NoRepository {
    fn predates(&self, _: &Candidate<'_>) -> bool {
        false
    }
}

proptest! {
    #[test]
    fn containment_is_what_the_standard_library_says(root in canonical(), path in canonical(), other in canonical()) {
        let as_path = |bytes: &[u8]| ByteString::from(bytes).to_path_buf();
        prop_assert_eq!(is_within(&root, &path), as_path(&path).starts_with(as_path(&root)));
        prop_assert!(is_within(&root, &root));
        if is_within(&root, &path) && is_within(&path, &other) {
            prop_assert!(is_within(&root, &other));
        }
        if is_within(&root, &path) && is_within(&path, &root) {
            prop_assert_eq!(root, path);
        }
    }

    #[test]
    fn an_allowed_change_is_in_a_writable_root_and_in_no_protected_path(
        confinement in confinement(), operation in one(Operation::ALL), path in canonical(),
    ) {
        let within = |list: &[ByteString]| list.iter().any(|root| is_within(root.as_bytes(), &path));
        if decide::write(&confinement, operation, &path) == Verdict::Allow && path != b"/dev/null" && operation != Operation::ReadFile {
            let is_connect = operation == Operation::ConnectUnix;
            prop_assert!(confinement.mode == SandboxMode::WorkspaceWrite || is_connect);
            prop_assert!(within(&confinement.writable));
            prop_assert!(!within(&confinement.protect));
        }
        prop_assert_eq!(decide::read(&confinement, &path) == Verdict::Allow, !within(&confinement.deny_read));
    }

    #[test]
    fn more_protection_and_fewer_roots_never_allow_more(
        confinement in confinement(), operation in one(Operation::ALL), path in canonical(), extra in canonical(),
    ) {
        let allowed = |confinement: &Confinement| decide::write(confinement, operation, &path) == Verdict::Allow;
        let mut stricter = confinement.clone();
        stricter.protect.push(extra.into());
        stricter.deny_read.extend(stricter.protect.clone());
        stricter.writable.pop();
        prop_assert!(!allowed(&stricter) || allowed(&confinement));
        let strictest = Confinement { mode: SandboxMode::ReadOnly, writable: vec![], ..confinement.clone() };
        prop_assert!(!allowed(&strictest) || allowed(&confinement));
        let knows_nothing = decide::write(&confinement, operation, &path);
        if knows_nothing == Verdict::Allow {
            prop_assert_eq!(decide::write_with(&confinement, operation, &path, &NoRepository), Verdict::Allow);
        }
    }

    #[test]
    fn a_remedy_exists_for_every_refusal_and_is_one_line(
        confinement in confinement(), operation in one(Operation::ALL), path in vec(any::<u8>(), 0..12),
    ) {
        let path = [b"/", path.as_slice()].concat();
        if let Verdict::Refuse(rule) = decide::write(&confinement, operation, &path) {
            let remedy = decide::allowed_by(&confinement, operation, rule, Some(&path)).unwrap();
            prop_assert!(!remedy.chars().any(char::is_control), "{:?}", remedy);
        }
    }
}
