//! What a model is told about the tools: the schemas of their arguments and of the value of `bash`, and the section of the prompt.
use dsh_policy::SandboxMode;
use dsh_policy::denial::{Errno, Operation, Rule};
use dsh_policy::mode::{EnforcementLevel, Guarantee, Network, Tier};
use serde_json::{Map, Value, json};

/// Name of the prompt's section.
pub const PROMPT_SECTION: &str = "tool:bash";
/// Where the section stands among the others.
pub const PROMPT_ORDER: u32 = 105;
/// The section.
pub const PROMPT: &str = "Check the [exit code: N] marker on every bash result; investigate failures before moving on.";

/// Which of the optional arguments there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// Background tasks (`enableRunInBackground`).
    pub background: bool,
    /// A wider mode: only where something confines.
    pub escalation: bool,
}

/// JSON Schema of the arguments of `bash`.
#[must_use]
pub fn bash_arguments(offer: Offer) -> Value {
    let mut properties = json!({
        "command": {"type": "string", "minLength": 1, "description": "The command, run by `bash -c` in a fresh shell: nothing carries over from one call to the next."},
        "description": {"type": "string", "minLength": 1, "description": "What the command does, in a few words, for the user."},
        "timeoutMs": {"type": "number", "exclusiveMinimum": 0, "description": "Time limit in milliseconds. The default is two minutes."},
        "workdir": {"type": "string", "minLength": 1, "description": "Folder to start in: absolute, or relative to the workspace, which is the default."},
    });
    let mut add = |key: &str, value: Value| properties[key] = value;
    if offer.background {
        add(
            "run_in_background",
            json!({"type": "boolean", "description": "Return at once with a task id instead of waiting for the end."}),
        );
    }
    if offer.escalation {
        add(
            "sandbox_permissions",
            json!({"type": "string", "enum": ["workspace-write", "danger-full-access"],
                "description": "A wider mode for this one call, after a denial. The user is asked. Name the narrowest that suffices."}),
        );
        add(
            "justification",
            json!({"type": "string", "minLength": 1, "description": "Why the wider mode is needed, as one sentence that the user reads. Only together with sandbox_permissions."}),
        );
    }
    json!({"type": "object", "properties": properties, "required": ["command", "description"]})
}

/// JSON Schema of the arguments of `task_output`.
#[must_use]
pub fn task_output() -> Value {
    let properties = json!({
        "task_id": text("The id that starting the task gave."),
        "wait": {
            "type": "boolean",
            "description": "Wait until the task has finished or the time is over. The task goes on either way."
        },
        "timeout_ms": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "Milliseconds to wait at most; 30000 when left out, never more than 600000."
        },
    });
    object(&properties, &["task_id"])
}

/// JSON Schema of the arguments of `task_list`.
#[must_use]
pub fn task_list() -> Value {
    object(&json!({}), &[])
}

/// JSON Schema of the arguments of `task_kill`.
#[must_use]
pub fn task_kill() -> Value {
    let properties = json!({
        "task_id": text("The id that starting the task gave."),
        "reason": text("Why, for the log."),
    });
    object(&properties, &["task_id"])
}

/// JSON Schema of the value of a call of `bash`: a result, or the id of a task.
#[must_use]
pub fn bash_value() -> Value {
    let mut foreground = run_result();
    foreground["properties"]["kind"] = json!({"const": "foreground"});
    if let Some(required) = foreground["required"].as_array_mut() {
        required.push(json!("kind"));
    }
    let background = json!({"kind": {"const": "background"}, "taskId": {"type": "string"}});
    json!({
        "type": "object",
        "oneOf": [foreground, object(&background, &["kind", "taskId"])]
    })
}

fn text(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

fn object(properties: &Value, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required})
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

/// Bytes that are usually text: a string, or what no string can hold.
fn bytes() -> Value {
    json!({"oneOf": [
        {"type": "string"},
        {"type": "object", "properties": {"base64": {"type": "string"}}, "required": ["base64"]}
    ]})
}

fn one_of<T: Copy>(all: &[T], name: fn(T) -> &'static str) -> Value {
    let names: Vec<_> = all.iter().map(|value| name(*value)).collect();
    json!({"type": "string", "enum": names})
}

/// An object all of whose fields are there, but for those named last.
fn report(properties: &Value, optional: &[&str]) -> Value {
    let all = properties.as_object().map(Map::keys).into_iter().flatten();
    let required: Vec<&str> = all
        .map(String::as_str)
        .filter(|name| !optional.contains(name))
        .collect();
    object(properties, &required)
}

fn run_result() -> Value {
    report(
        &json!({
            "exitCode": {"type": ["integer", "null"], "description": "Null exactly when signal is set."},
            "signal": {"type": ["string", "null"], "description": "Name of the signal that ended the shell."},
            "timedOut": {"type": "boolean"},
            "aborted": {"type": "boolean"},
            "timeoutMs": count(),
            "stdout": stream(),
            "stderr": stream(),
            "sandbox": sandbox(),
            "environment": report(&json!({"removed": {"type": "array", "items": bytes()}}), &[]),
            "survivors": count(),
            "usage": report(
                &json!({"wallMs": count(), "userMs": count(), "systemMs": count(), "maxRssKib": count()}),
                &[],
            ),
        }),
        &[],
    )
}

fn stream() -> Value {
    let properties = json!({
        "text": {"type": "string", "description": "The tail."},
        "truncated": {"type": "boolean"},
        "bytes": count(),
        "spillPath": bytes(),
        "raw": bytes(),
    });
    report(&properties, &["spillPath", "raw"])
}

fn sandbox() -> Value {
    let unenforced = report(
        &json!({"guarantee": one_of(Guarantee::ALL, Guarantee::as_str), "reason": {"type": "string"}}),
        &[],
    );
    let properties = json!({
        "mode": one_of(SandboxMode::ALL, SandboxMode::as_str),
        "denied": {"type": ["boolean", "null"], "description": "Null when refusals could not be observed."},
        "enforcement": one_of(EnforcementLevel::ALL, EnforcementLevel::as_str),
        "unenforced": {"type": "array", "items": unenforced},
        "tier": one_of(Tier::ALL, Tier::as_str),
        "network": one_of(Network::ALL, Network::as_str),
        "requestedMode": one_of(SandboxMode::ALL, SandboxMode::as_str),
        "observed": {"type": "boolean"},
        "unobservedReason": {"type": "string"},
        "denials": {"type": "array", "items": denial()},
        "denialsDropped": count(),
    });
    object(&properties, &["mode", "denied"])
}

fn denial() -> Value {
    let properties = json!({
        "operation": one_of(Operation::ALL, Operation::as_str),
        "syscall": {"type": "string"},
        "path": bytes(),
        "given": bytes(),
        "secondPath": bytes(),
        "detail": {"type": "string"},
        "errno": one_of(Errno::ALL, Errno::as_str),
        "rule": one_of(Rule::ALL, Rule::as_str),
        "pid": count(),
        "parents": {"type": "array", "items": count()},
        "executable": bytes(),
        "count": count(),
        "firstMs": count(),
        "lastMs": count(),
        "allowedBy": {"type": "string"},
    });
    let optional = [
        "path",
        "given",
        "secondPath",
        "detail",
        "parents",
        "executable",
        "allowedBy",
    ];
    report(&properties, &optional)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::tool::bash::BashValue;
    use dsh_policy::DenialFact;
    use dsh_policy::result::{ConfinedReport, EnvironmentReport, SandboxReport, StreamResult, Unenforced, Usage};
    use dsh_policy::{BashRunResult, ByteString};

    fn names(schema: &Value) -> Vec<&str> {
        schema["properties"]
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect()
    }

    #[test]
    fn fields_appear_when_they_can_be_used() {
        for (background, escalation) in [(false, false), (true, false), (false, true), (true, true)] {
            let schema = bash_arguments(Offer { background, escalation });
            let mut expected = vec!["command", "description", "timeoutMs", "workdir"];
            expected.extend(background.then_some("run_in_background"));
            expected.extend(["justification", "sandbox_permissions"].iter().filter(|_| escalation));
            expected.sort_unstable();
            let mut found = names(&schema);
            found.sort_unstable();
            assert_eq!(found, expected);
            assert_eq!(schema["required"], json!(["command", "description"]));
        }
    }

    #[test]
    fn the_task_tools_take_what_the_contract_says() {
        assert_eq!(task_output()["required"], json!(["task_id"]));
        assert_eq!(task_kill()["required"], json!(["task_id"]));
        assert_eq!(task_list(), json!({"type": "object", "properties": {}, "required": []}));
        let (output, kill) = (task_output(), task_kill());
        let mut found = [names(&output), names(&kill)].concat();
        found.sort_unstable();
        assert_eq!(found, ["reason", "task_id", "task_id", "timeout_ms", "wait"]);
    }

    /// What is wrong with `value`, and where. As much of JSON Schema as is used here, and stricter: a field that the schema does not name is wrong.
    fn faults(schema: &Value, value: &Value, place: &str) -> Vec<String> {
        if let Some(alternatives) = schema["oneOf"].as_array() {
            let tried: Vec<_> = alternatives.iter().map(|one| faults(one, value, place)).collect();
            let fitting = tried.iter().filter(|faults| faults.is_empty()).count();
            return if fitting == 1 { Vec::new() } else { tried.concat() };
        }
        let mut found = Vec::new();
        if let Some(constant) = schema.get("const") {
            return if constant == value {
                found
            } else {
                vec![format!("{place} is {value}")]
            };
        }
        let types: Vec<&str> = match &schema["type"] {
            Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect(),
        };
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let allowed = schema["enum"].as_array().is_none_or(|all| all.contains(value));
        if !types.contains(&kind) || !allowed {
            found.push(format!("{place} is {value}"));
        }
        for (name, inner) in value.as_object().into_iter().flatten() {
            match schema["properties"].get(name) {
                Some(schema) => found.extend(faults(schema, inner, &format!("{place}.{name}"))),
                None => found.push(format!("{place}.{name} is not in the schema")),
            }
        }
        for name in schema["required"].as_array().into_iter().flatten() {
            if value.is_object() && value.get(name.as_str().unwrap()).is_none() {
                found.push(format!("{place}.{name} is missing"));
            }
        }
        for (index, item) in value.as_array().into_iter().flatten().enumerate() {
            found.extend(faults(&schema["items"], item, &format!("{place}[{index}]")));
        }
        found
    }

    fn whole_stream() -> StreamResult {
        StreamResult {
            text: "a".into(),
            truncated: true,
            bytes: 9,
            spill_path: Some("/s/1".into()),
            raw: Some(ByteString(vec![0xff])),
        }
    }

    fn whole_fact() -> DenialFact {
        DenialFact {
            operation: Operation::Rename,
            syscall: "renameat2".into(),
            path: Some("/a".into()),
            given: Some("a".into()),
            second_path: Some("/b".into()),
            detail: Some("x".into()),
            errno: Errno::Eacces,
            rule: Rule::ReadOnlyMode,
            pid: 2,
            parents: vec![1],
            executable: Some("/bin/mv".into()),
            count: 1,
            first_ms: 1,
            last_ms: 2,
            allowed_by: Some("x".into()),
        }
    }

    /// Every field that there is, each with something in it.
    fn whole_result() -> BashRunResult {
        let confined = ConfinedReport {
            enforcement: EnforcementLevel::Partial,
            unenforced: vec![Unenforced {
                guarantee: Guarantee::Facts,
                reason: "x".into(),
            }],
            tier: Tier::Landlock,
            network: Network::Full,
            requested_mode: Some(SandboxMode::DangerFullAccess),
            observed: false,
            unobserved_reason: Some("x".into()),
            denials: vec![whole_fact()],
            denials_dropped: 1,
        };
        BashRunResult {
            exit_code: None,
            signal: Some("SIGTERM".into()),
            timed_out: true,
            aborted: false,
            timeout_ms: 5,
            stdout: whole_stream(),
            stderr: whole_stream(),
            sandbox: SandboxReport {
                mode: SandboxMode::ReadOnly,
                denied: None,
                confined: Some(confined),
            },
            environment: EnvironmentReport {
                removed: vec!["A_TOKEN".into(), ByteString(vec![0xff])],
            },
            survivors: 0,
            usage: Usage::default(),
        }
    }

    #[test]
    fn the_schema_of_the_output_has_every_field_of_a_value() {
        let mut least = whole_result();
        (least.stdout, least.exit_code, least.signal) = (StreamResult::default(), Some(0), None);
        (least.sandbox.confined, least.sandbox.mode) = (None, SandboxMode::DangerFullAccess);
        least.sandbox.denied = Some(false);
        let background = BashValue::Background {
            task_id: "bash-1".into(),
        };
        for value in [whole_result(), least]
            .map(|result| BashValue::Foreground(Box::new(result)))
            .into_iter()
            .chain([background])
        {
            let json = serde_json::to_value(&value).unwrap();
            assert_eq!(faults(&bash_value(), &json, "value"), Vec::<String>::new());
            assert_eq!(serde_json::from_value::<BashValue>(json).unwrap(), value);
        }
        let mut wrong = serde_json::to_value(BashValue::Foreground(Box::new(whole_result()))).unwrap();
        wrong["stdout"]["colour"] = json!("red");
        assert!(!faults(&bash_value(), &wrong, "value").is_empty(), "the check can fail");
    }
}
