"""The same script on several machines: by ssh, on Slurm, or handed over to Kubeflow and SkyPilot as text."""
