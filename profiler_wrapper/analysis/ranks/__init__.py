"""Many ranks beside one another: who is slow, why, and what it costs the job."""
