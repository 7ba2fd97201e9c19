//! The tools `task_output`, `task_list` and `task_kill` on a connection, and the connection as what starts tasks.
use dsh_policy::task::WaitFor;
use dsh_policy::{BashExecRequest, SandboxMode};
use serde_json::Value;

use super::arguments::{milliseconds, sentence};
use super::error::ToolError;
use super::task::{Pending, ProcessRead, TaskStarter, kill_text, list_text, output_text};
use crate::connection::Connection;
use crate::error::ClientError;

impl TaskStarter for Connection {
    fn preflight<'a>(&'a self, session: Option<&'a str>) -> Pending<'a, Result<(), String>> {
        Box::pin(async move {
            if !self
                .greeting()
                .capabilities
                .iter()
                .any(|capability| capability == "tasks")
            {
                return Err("this daemon has no background tasks; install a newer one".to_owned());
            }
            // Proves that the daemon answers. It checks its own limits before it starts anything.
            self.tasks(session).await.map(drop).map_err(|error| error.to_string())
        })
    }

    fn start(&self, request: BashExecRequest) -> Pending<'_, Result<String, ClientError>> {
        Box::pin(async move { Ok(self.start_task(request).await?.task) })
    }
}

/// Who asks, and whether a wider mode can be asked for.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// Only its tasks, and those without a session, are known to it.
    pub session: Option<&'a str>,
    /// The hint at `sandbox_permissions` is given after a refusal.
    pub escalation_offered: bool,
}

/// The text of a call of one of the three tools; none for any other name.
///
/// # Errors
/// [`ToolError`]: an argument is not valid, or the task is unknown.
pub async fn call(
    connection: &Connection,
    name: &str,
    arguments: &Value,
    caller: Caller<'_>,
) -> Option<Result<String, ToolError>> {
    Some(match name {
        "task_output" => output(connection, arguments, caller).await,
        "task_list" => connection
            .tasks(caller.session)
            .await
            .map(|tasks| list_text(&tasks))
            .map_err(ToolError::from),
        "task_kill" => kill(connection, arguments, caller).await,
        _ => return None,
    })
}

async fn output(connection: &Connection, arguments: &Value, caller: Caller<'_>) -> Result<String, ToolError> {
    let task = task_id(arguments)?;
    let wait = match arguments.get("wait").filter(|wait| !wait.is_null()) {
        None => WaitFor::Nothing,
        Some(wait) => match wait.as_bool() {
            Some(true) => WaitFor::End,
            Some(false) => WaitFor::Nothing,
            None => return Err(ToolError::Wait(wait.to_string())),
        },
    };
    let timeout = arguments.get("timeout_ms").filter(|timeout| !timeout.is_null());
    let timeout = timeout.map(milliseconds).transpose();
    let timeout = timeout.map_err(|value| ToolError::TaskTimeout(value.to_string()))?;
    let output = connection
        .task_output(caller.session, &task, None, wait, timeout)
        .await?;
    let status = output.info.status.clone();
    let read = ProcessRead::from(output);
    let offered = caller.escalation_offered && read.sandbox.mode < SandboxMode::DangerFullAccess;
    Ok(output_text(&read, &status, offered))
}

async fn kill(connection: &Connection, arguments: &Value, caller: Caller<'_>) -> Result<String, ToolError> {
    let task = task_id(arguments)?;
    let reason = arguments.get("reason").and_then(Value::as_str);
    let before = connection.kill_task(caller.session, &task, reason).await?;
    Ok(kill_text(&task, &before.status))
}

fn task_id(arguments: &Value) -> Result<String, ToolError> {
    sentence(arguments.get("task_id")).ok_or(ToolError::TaskId)
}
