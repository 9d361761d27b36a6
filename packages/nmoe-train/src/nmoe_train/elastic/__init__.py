"""Training that goes on when workers are lost, and takes them in when they come back.

From the bottom: `membership` (pure rules), `probes`, `link` (the store that outlives workers),
`heartbeat`, `cut` (ends waits for the dead), `coordinator` (decides, beside the store), `snapshot`
(state in memory), `session` (what the loop sees), `recover` (a worker's life), `launcher`.
"""
